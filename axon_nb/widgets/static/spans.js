// Spans by rank: what the kernel sends, what is on show, what lies in each pixel. Pure functions; tests/js runs them.

import { pad, size, unpack } from "./common.js";

// ---- what the kernel sends: see axon_nb/widgets/span_wire.py -------------------------------------------------------

export function decode(view) {
  const { header, take } = unpack(view);
  const { count: n, patched: m } = header;
  const columns = { start: take(Float64Array, n) };
  for (const name of ["duration", "bytes", "late"]) columns[name] = take(Float32Array, n);
  const patches = { number: take(Uint32Array, m), late: take(Float32Array, m) };
  for (const name of ["label", "rank"]) columns[name] = take(Uint16Array, n);
  for (const name of ["stage", "microbatch", "by"]) columns[name] = take(Int16Array, n);
  patches.by = take(Int16Array, m);
  return { header, columns, patches };
}

const TYPES = {
  start: Float64Array,
  duration: Float32Array,
  bytes: Float32Array,
  late: Float32Array,
  label: Uint16Array,
  rank: Uint16Array,
  stage: Int16Array,
  microbatch: Int16Array,
  by: Int16Array,
};
const SPARE = 20000; // spans that are no more kept in the kernel and still lie here, before they are cleared away
const BLOCK = 512; // spans of which the first start and the last end are known

export function newStore(capacity = 4096) {
  const columns = {};
  for (const [name, Type] of Object.entries(TYPES)) columns[name] = new Type(capacity);
  const rest = { labels: [], groups: {}, focus: [null, null], facts: null, pipelines: [], begins: [], ends: [] };
  return { columns, first: -1, count: 0, skip: 0, now: 0, lost: 0, dropped: 0, missing: 0, finished: false, updates: 0, ...rest };
}

function grow(store, wanted) {
  let capacity = store.columns.start.length;
  if (wanted <= capacity) return;
  while (capacity < wanted) capacity *= 2;
  for (const [name, Type] of Object.entries(TYPES)) {
    const wider = new Type(capacity);
    wider.set(store.columns[name].subarray(0, store.count));
    store.columns[name] = wider;
  }
}

/** Clear away what the kernel has dropped. */
/** Note when each block begins and ends, from a span on. */
function index(store, from) {
  const { start, duration: length } = store.columns;
  store.begins.length = store.ends.length = Math.ceil(from / BLOCK);
  for (let i = from; i < store.count; i++) {
    const block = (i / BLOCK) | 0;
    const end = start[i] + length[i];
    if (block === store.begins.length) {
      store.begins.push(start[i]);
      store.ends.push(end);
      continue;
    }
    if (start[i] < store.begins[block]) store.begins[block] = start[i];
    if (end > store.ends[block]) store.ends[block] = end;
  }
}

/** Call `take` with the place of each span that may lie between two times: blocks without any are passed over. */
function between(store, from, to, take) {
  for (let low = store.skip; low < store.count; ) {
    const block = (low / BLOCK) | 0;
    const high = Math.min(store.count, (block + 1) * BLOCK);
    if (store.begins[block] <= to && store.ends[block] >= from) for (let i = low; i < high; i++) take(i);
    low = high;
  }
}

/** Clear away what the kernel has dropped. */
function clear(store, oldest) {
  store.skip = Math.min(store.count, Math.max(0, oldest - store.first));
  if (store.skip <= SPARE) return;
  for (const column of Object.values(store.columns)) column.copyWithin(0, store.skip, store.count);
  store.count -= store.skip;
  store.first += store.skip;
  store.skip = 0;
  index(store, 0);
}

/** Take a message in; false when an earlier one is missing, so that everything has to be sent again. */
export function merge(store, { header, columns, patches }) {
  if (header.restart || (store.first < 0 && header.labelsFrom === 0)) {
    Object.assign(store, { first: header.first, count: 0, skip: 0, missing: Math.max(0, header.first - header.oldest) });
    if (header.labelsFrom === 0) Object.assign(store, { labels: [], groups: {} });
  }
  let end = store.first + store.count;
  if (header.first > end && header.first <= header.oldest) {
    Object.assign(store, { first: header.first, count: 0, skip: 0 });
    end = header.first;
  }
  if (store.first < 0 || header.first > end || header.labelsFrom > store.labels.length) return false;
  header.labels.forEach((label, i) => (store.labels[header.labelsFrom + i] = label));
  Object.assign(store.groups, header.groups);
  const known = Math.min(header.count, end - header.first);
  grow(store, store.count + header.count - known);
  for (const name of Object.keys(TYPES)) store.columns[name].set(columns[name].subarray(known), store.count);
  store.count += header.count - known;
  index(store, store.count - (header.count - known));
  for (let i = 0; i < header.patched; i++) {
    const at = patches.number[i] - store.first;
    if (at < 0 || at >= store.count) continue;
    store.columns.late[at] = patches.late[i];
    store.columns.by[at] = patches.by[i];
  }
  const { now, lost, dropped, focus, finished, number = 0 } = header;
  Object.assign(store, { now, lost, dropped, focus, finished, number });
  store.updates++;
  if (header.facts) store.facts = header.facts;
  if (header.pipelines) store.pipelines = header.pipelines;
  clear(store, header.oldest);
  return true;
}

// ---- words ---------------------------------------------------------------------------------------------------------

export function duration(seconds) {
  if (seconds < 1e-3) return `${(seconds * 1e6).toFixed(seconds < 1e-5 ? 1 : 0)} µs`;
  if (seconds < 0.1) return `${Number((seconds * 1e3).toPrecision(3))} ms`;
  if (seconds < 99.95) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${pad(whole % 60)} s`;
  return `${Math.floor(whole / 3600)} h ${pad(Math.floor(whole / 60) % 60)} min`;
}

/** One span in full. */
export function describe(store, i, config, zero = 0) {
  const { start, duration: length, bytes, late, label, rank, stage, microbatch, by } = store.columns;
  const [code, name, group] = store.labels[label[i]];
  const { kind, label: called } = config.paints[code];
  const parts = [`rank ${rank[i]}`];
  if (kind === "wait") parts.push(stage[i] >= 0 ? `waits for message ${name}` : `waits in ${name}`);
  else parts.push(name === kind || name === called ? called : kind === "collective" ? name : `${called} ${name}`);
  parts.push(duration(length[i]));
  if (stage[i] >= 0) parts.push(`stage ${stage[i]}, microbatch ${microbatch[i]}`);
  if (bytes[i] > 0) parts.push(size(bytes[i]));
  if (group && kind !== "wait") parts.push(`group ${group}${store.groups[group] ? ` (${store.groups[group]})` : ""}`);
  if (by[i] === rank[i]) parts.push("came last");
  else if (by[i] >= 0) parts.push(`waited ${duration(late[i])} for rank ${by[i]}`);
  parts.push(`at ${(start[i] - zero).toFixed(length[i] < 0.01 ? 4 : 2)} s`);
  return parts.join(" · ");
}

// ---- what is on show -----------------------------------------------------------------------------------------------

const SHORTEST = 0.2; // seconds that the axis spans at least while a cell runs
export const NARROWEST = 2e-5; // seconds
const STEPS = [1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5];
STEPS.push(1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200);

/** The first start and the last end, or the present while a cell runs. */
export function extent(store, now) {
  const { start, duration: length } = store.columns;
  let from = Infinity;
  let to = -Infinity;
  const first = Math.ceil(store.skip / BLOCK); // the block before is there in part
  for (let i = store.skip; i < Math.min(store.count, first * BLOCK); i++) {
    from = Math.min(from, start[i]);
    to = Math.max(to, start[i] + length[i]);
  }
  for (let block = first; block < store.begins.length; block++) {
    from = Math.min(from, store.begins[block]);
    to = Math.max(to, store.ends[block]);
  }
  if (store.focus[0] !== null && store.focus[1] === null) to = Math.max(to, now);
  return from < to ? { from, to } : { from: 0, to: SHORTEST };
}

/** The stretch of time on show. A view of null is the cell that runs, or the last one; `all` is everything. */
export function visible(view, store, now) {
  const whole = view === "all" || store.focus[0] === null ? extent(store, now) : null;
  if (view === "all") return whole;
  const from = store.focus[0] ?? whole.from;
  const to = Math.max(store.focus[1] ?? (whole ? whole.to : now), from + SHORTEST / 100);
  const running = store.focus[0] !== null && store.focus[1] === null;
  if (!view) return { from, to: running ? Math.max(to, from + SHORTEST) : to + (to - from) / 200 };
  return view.follow ? { from: to - view.span, to } : view;
}

/** The view after a key, or null where the key means nothing here. */
export function navigate(view, key, store, now) {
  const { from, to } = visible(view, store, now);
  const latest = visible(null, store, now);
  const span = to - from;
  const middle = (from + to) / 2;
  const follows = !view || view.follow;
  if (key === "+" || key === "=") {
    const narrow = Math.max(span / 2, NARROWEST);
    const running = store.focus[0] !== null && store.focus[1] === null;
    if (follows && running) return { view: { follow: true, span: narrow } };
    return { view: { from: middle - narrow / 2, to: middle + narrow / 2 } };
  }
  if (key === "-" || key === "_") {
    if (view?.follow) return { view: 2 * span >= latest.to - latest.from ? null : { follow: true, span: 2 * span } };
    const whole = extent(store, now);
    if (2 * span >= whole.to - whole.from) return { view: "all" };
    return { view: { from: middle - span, to: middle + span } };
  }
  if (key === "ArrowLeft") return { view: { from: from - span / 5, to: to - span / 5 } };
  if (key === "ArrowRight") return { view: { from: from + span / 5, to: to + span / 5 } };
  if (key === "End") return { view: { follow: true, span } };
  if (key === "Home") return { view: null };
  if (key === "a") return { view: "all" };
  return null;
}

export function zoomAt({ from, to }, time, factor) {
  const span = Math.max((to - from) * factor, NARROWEST);
  const left = time - ((time - from) / (to - from)) * span;
  return { from: left, to: left + span };
}

export function ticks(from, to, zero, width) {
  const most = Math.max(2, width / 90);
  const step = STEPS.find((candidate) => (to - from) / candidate <= most) ?? 86400;
  const found = [];
  for (let i = Math.ceil((from - zero) / step - 1e-9); zero + i * step <= to + 1e-12; i++) {
    const at = i * step;
    found.push({ at, x: ((zero + at - from) / (to - from)) * width, label: clock(at, step) });
  }
  return found;
}

function clock(at, step) {
  if (step >= 1 && Math.abs(at) >= 60) {
    const whole = Math.round(Math.abs(at));
    const text = `${Math.floor((whole / 60) % 60)}:${pad(whole % 60)}`;
    const hours = Math.floor(whole / 3600);
    return `${at < 0 ? "−" : ""}${hours ? `${hours}:${text.padStart(5, "0")}` : text}`;
  }
  if (step < 1e-3 && Math.abs(at) < 0.01) return `${(at * 1e3).toFixed(Math.max(0, -Math.floor(Math.log10(step) + 3 + 1e-9)))} ms`;
  return `${at.toFixed(Math.max(0, -Math.floor(Math.log10(step) + 1e-9)))} s`;
}

/** Of each label and row: whether it is shown. Each word of the filter has to be found; kinds can be switched off. */
export function allowed(store, ranks, config, filter, off) {
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  const found = new Uint8Array(store.labels.length * ranks.length);
  store.labels.forEach(([code, name, group], label) => {
    const { kind, label: called } = config.paints[code];
    if (off.has(kind)) return;
    const text = `${kind} ${called} ${name} ${group ? `group:${group} ${store.groups[group] ?? ""}` : ""}`.toLowerCase();
    ranks.forEach((rank, row) => {
      const whole = `${text} rank:${rank}`;
      found[label * ranks.length + row] = words.every((word) => whole.includes(word)) ? 1 : 0;
    });
  });
  return found;
}

// ---- layout --------------------------------------------------------------------------------------------------------

/** Pixels of a rank's row: the line of its cell, its code, its communication. */
export function geometry(numRanks) {
  if (numRanks <= 8) return { height: 36, cell: [2, 2], lanes: [[6, 16], [23, 10]] };
  if (numRanks <= 24) return { height: 25, cell: [1, 2], lanes: [[4, 11], [16, 7]] };
  return { height: 15, cell: [0, 1], lanes: [[2, 7], [9, 5]] };
}

function kindsOf(config) {
  const code = Object.fromEntries(config.paints.map((paint, i) => [paint.kind, i]));
  return { code, lanes: config.paints.map((paint) => paint.lane), count: config.paints.length };
}

const FEW = 3000; // spans in sight that may be written on

/**
 * How much of each pixel each kind takes: Float32Array by (row, lane, pixel, kind). In the lane of the code, what waits
 * does not compute; in that of communication, what comes before the last rank has begun it is waiting. Besides: how
 * many spans were `found`, the places of `cells`, and of the `few` that are there; null when there are more.
 */
export function shares(store, { ranks, from, to, width, shown, config }) {
  const { start, duration: length, late, label, rank } = store.columns;
  const { code, lanes, count: kinds } = kindsOf(config);
  const rowOf = new Int16Array(Math.max(0, ...ranks) + 1).fill(-1);
  ranks.forEach((number, row) => (rowOf[number] = row));
  const kindOf = Uint8Array.from(store.labels, ([kind]) => kind);
  const scale = width / (to - from);
  const share = new Float32Array(ranks.length * 2 * width * kinds);
  const cells = [];
  let few = [];
  let found = 0;
  const cover = (line, kind, x0, x1) => {
    const left = Math.max(0, x0);
    const right = Math.min(width, x1);
    for (let x = Math.floor(left); x < right; x++) {
      share[(line * width + x) * kinds + kind] += Math.min(right, x + 1) - Math.max(left, x);
    }
  };
  between(store, from, to, (i) => {
    const x0 = (start[i] - from) * scale;
    const x1 = x0 + Math.max(length[i] * scale, 1e-3);
    if (x0 > width || x1 < 0) return;
    const row = rowOf[rank[i]] ?? -1;
    if (row < 0 || !shown[label[i] * ranks.length + row]) return;
    const kind = kindOf[label[i]];
    if (lanes[kind] < 0) {
      cells.push(i);
      return;
    }
    found++;
    if (found > FEW) few = null;
    else few.push(i);
    const line = row * 2 + lanes[kind];
    const ready = lanes[kind] === 1 ? Math.min(x1, x0 + late[i] * scale) : x0;
    if (ready > x0) cover(line, code.wait, x0, ready);
    cover(line, kind, ready, x1);
  });
  for (let line = 0; line < ranks.length * 2; line += 2) {
    for (let x = 0; x < width; x++) {
      const at = (line * width + x) * kinds;
      const waits = share[at + code.wait];
      if (waits) for (const kind of [code.forward, code.backward, code.optimizer]) share[at + kind] -= Math.min(waits, share[at + kind]);
    }
  }
  return { share, found, cells, few };
}

/** The stretches of one line where one kind takes the most of each pixel: {left, right, kind}. */
export function runs(share, line, width, kinds) {
  const found = [];
  let current = null;
  let at = line * width * kinds;
  for (let x = 0; x < width; x++) {
    let kind = -1;
    let most = 0.004;
    for (let k = 0; k < kinds; k++, at++) {
      if (share[at] > most) {
        most = share[at];
        kind = k;
      }
    }
    if (current !== null && current.kind === kind) current.right = x + 1;
    else if (kind >= 0) found.push((current = { left: x, right: x + 1, kind }));
    else current = null;
  }
  return found;
}

/** The span at a time in a lane of a rank: the shortest that is there, or one at most `near` seconds away; -1: none. */
export function hit(store, { rank: wanted, row, lane, time, near, shown, ranks, config }) {
  const { start, duration: length, label, rank } = store.columns;
  let best = -1;
  let least = Infinity;
  between(store, time - near, time + near, (i) => {
    if (rank[i] !== wanted || start[i] > time + near || start[i] + length[i] < time - near) return;
    if (config.paints[store.labels[label[i]][0]].lane !== lane || !shown[label[i] * ranks.length + row]) return;
    const inside = start[i] <= time && time <= start[i] + length[i];
    const measure = length[i] + (inside ? 0 : 1e6);
    if (measure <= least) [least, best] = [measure, i];
  });
  return best;
}

/** The next span (`way` 1) or the one before (-1) in a lane of a rank, after or before a time; -1: there is none. */
export function neighbour(store, { rank: wanted, row, lane, time, way, shown, ranks, config }) {
  const { start, label, rank } = store.columns;
  let best = -1;
  for (let i = store.skip; i < store.count; i++) {
    if (rank[i] !== wanted || way * (start[i] - time) <= 1e-9) continue;
    if (config.paints[store.labels[label[i]][0]].lane !== lane || !shown[label[i] * ranks.length + row]) continue;
    if (best < 0 || way * (start[i] - start[best]) < 0) best = i;
  }
  return best;
}

/** The spans as a trace that Perfetto opens, microseconds from the first one on. */
export function chromeTrace(store, config) {
  const { columns, labels } = store;
  const { from } = extent(store, 0);
  const events = config.ranks.map((rank) => ({ name: "process_name", ph: "M", pid: rank, args: { name: `rank ${rank}` } }));
  for (let i = store.skip; i < store.count; i++) {
    const [code, name, group] = labels[columns.label[i]];
    const { kind } = config.paints[code];
    const args = {};
    if (group) args.group = group;
    if (columns.bytes[i]) args.bytes = columns.bytes[i];
    if (columns.stage[i] >= 0) Object.assign(args, { stage: columns.stage[i], microbatch: columns.microbatch[i] });
    if (columns.by[i] >= 0) Object.assign(args, { waited_us: columns.late[i] * 1e6, waited_for: columns.by[i] });
    const times = { ts: (columns.start[i] - from) * 1e6, dur: columns.duration[i] * 1e6 };
    events.push({ name, cat: kind, ph: "X", ...times, pid: columns.rank[i], tid: kind, args });
  }
  return { traceEvents: events, displayTimeUnit: "ms" };
}
