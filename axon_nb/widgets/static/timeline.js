// The timeline of `%timeline`: spans by rank. First pure functions (tests/js runs them), then the view.

// ---- what the kernel sends: see axon_nb/widgets/span_wire.py -------------------------------------------------------

export function decode(view) {
  const bytes = view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength);
  const size = new DataView(bytes).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 8, size)));
  let offset = 8 + size;
  const take = (Type, n) => {
    const column = new Type(bytes, offset, n);
    offset += n * Type.BYTES_PER_ELEMENT;
    return column;
  };
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

export function newStore(capacity = 4096) {
  const columns = {};
  for (const [name, Type] of Object.entries(TYPES)) columns[name] = new Type(capacity);
  const rest = { labels: [], groups: {}, focus: [null, null], facts: null, pipelines: [] };
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
function clear(store, oldest) {
  store.skip = Math.min(store.count, Math.max(0, oldest - store.first));
  if (store.skip <= SPARE) return;
  for (const column of Object.values(store.columns)) column.copyWithin(0, store.skip, store.count);
  store.count -= store.skip;
  store.first += store.skip;
  store.skip = 0;
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
  for (let i = 0; i < header.patched; i++) {
    const at = patches.number[i] - store.first;
    if (at < 0 || at >= store.count) continue;
    store.columns.late[at] = patches.late[i];
    store.columns.by[at] = patches.by[i];
  }
  const { now, lost, dropped, focus, finished } = header;
  Object.assign(store, { now, lost, dropped, focus, finished });
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
  const pad = (number) => String(number).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${pad(whole % 60)} s`;
  return `${Math.floor(whole / 3600)} h ${pad(Math.floor(whole / 60) % 60)} min`;
}

export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; bytes >= 999.5 && unit < units.length - 1; unit++) bytes /= 1024;
  return `${unit ? bytes.toPrecision(3) : Math.round(bytes)} ${units[unit]}`;
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
const NARROWEST = 2e-5;
const STEPS = [1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5];
STEPS.push(1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200);

/** The first start and the last end, or the present while a cell runs. */
export function extent(store, now) {
  const { start, duration: length } = store.columns;
  let from = Infinity;
  let to = -Infinity;
  for (let i = store.skip; i < store.count; i++) {
    if (start[i] < from) from = start[i];
    if (start[i] + length[i] > to) to = start[i] + length[i];
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
    const pad = (number) => String(number).padStart(2, "0");
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

/**
 * How much of each pixel each kind takes: Float32Array by (row, lane, pixel, kind). In the lane of the code, what waits
 * does not compute; in that of communication, what comes before the last rank has begun it is waiting.
 */
export function shares(store, { ranks, from, to, width, shown, config }) {
  const { start, duration: length, late, label, rank } = store.columns;
  const { code, lanes, count: kinds } = kindsOf(config);
  const rowOf = new Map(ranks.map((number, row) => [number, row]));
  const kindOf = Uint8Array.from(store.labels, ([kind]) => kind);
  const scale = width / (to - from);
  const share = new Float32Array(ranks.length * 2 * width * kinds);
  let found = 0;
  const cover = (line, kind, x0, x1) => {
    const left = Math.max(0, x0);
    const right = Math.min(width, x1);
    for (let x = Math.floor(left); x < right; x++) {
      share[(line * width + x) * kinds + kind] += Math.min(right, x + 1) - Math.max(left, x);
    }
  };
  for (let i = store.skip; i < store.count; i++) {
    const x0 = (start[i] - from) * scale;
    if (x0 > width) continue;
    const x1 = x0 + Math.max(length[i] * scale, 1e-3);
    if (x1 < 0) continue;
    const row = rowOf.get(rank[i]);
    const kind = kindOf[label[i]];
    if (row === undefined || lanes[kind] < 0 || !shown[label[i] * ranks.length + row]) continue;
    found++;
    const line = row * 2 + lanes[kind];
    const ready = lanes[kind] === 1 ? Math.min(x1, x0 + late[i] * scale) : x0;
    if (ready > x0) cover(line, code.wait, x0, ready);
    cover(line, kind, ready, x1);
  }
  for (let line = 0; line < ranks.length * 2; line += 2) {
    for (let x = 0; x < width; x++) {
      const at = (line * width + x) * kinds;
      const waits = share[at + code.wait];
      if (waits) for (const kind of [code.forward, code.backward, code.optimizer]) share[at + kind] -= Math.min(waits, share[at + kind]);
    }
  }
  return { share, found };
}

/** The stretches of one line where one kind takes the most of each pixel: {left, right, kind}. */
export function runs(share, line, width, kinds) {
  const found = [];
  let current = null;
  for (let x = 0; x < width; x++) {
    let kind = -1;
    let most = 0.004;
    for (let k = 0; k < kinds; k++) {
      const value = share[(line * width + x) * kinds + k];
      if (value > most) [most, kind] = [value, k];
    }
    if (current && current.kind === kind) current.right = x + 1;
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
  for (let i = store.skip; i < store.count; i++) {
    if (rank[i] !== wanted || start[i] > time + near || start[i] + length[i] < time - near) continue;
    if (config.paints[store.labels[label[i]][0]].lane !== lane || !shown[label[i] * ranks.length + row]) continue;
    const inside = start[i] <= time && time <= start[i] + length[i];
    const measure = length[i] + (inside ? 0 : 1e6);
    if (measure <= least) [least, best] = [measure, i];
  }
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

// ---- drawing -------------------------------------------------------------------------------------------------------

const LINES = {
  rows: { color: "rgba(255,255,255,.75)", width: 1, paths: [[0, 2, 8, 2], [0, 6, 8, 6]] },
  bars: { color: "rgba(255,255,255,.45)", width: 1, paths: [[1.5, 0, 1.5, 8], [5.5, 0, 5.5, 8]] },
  dots: { color: "rgba(17,17,17,.7)", width: 2, paths: [[1, 2, 3, 2], [5, 6, 7, 6]] },
  hatch: { color: "rgba(17,17,17,.65)", width: 1.5, paths: [[-2, 2, 2, -2], [0, 8, 8, 0], [6, 10, 10, 6]] },
  cross: { color: "rgba(255,255,255,.6)", width: 1.2, paths: [[0, 0, 8, 8], [8, 0, 0, 8]] },
};

function makePattern(context, name, ratio) {
  const { color, width, paths } = LINES[name];
  const tile = document.createElement("canvas");
  tile.width = tile.height = Math.round(8 * ratio);
  const pen = tile.getContext("2d");
  pen.scale(tile.width / 8, tile.height / 8);
  pen.strokeStyle = color;
  pen.lineWidth = width;
  for (const [x0, y0, x1, y1] of paths) {
    pen.beginPath();
    pen.moveTo(x0, y0);
    pen.lineTo(x1, y1);
    pen.stroke();
  }
  return context.createPattern(tile, "repeat");
}

/** Fill a box (device pixels) with a paint. */
function fill(context, paint, patterns, ratio, left, top, width, height) {
  if (paint.pattern === "hollow") {
    context.save();
    context.strokeStyle = paint.color;
    context.lineWidth = ratio;
    context.setLineDash([2 * ratio, 2 * ratio]);
    context.strokeRect(left + ratio / 2, top + ratio / 2, Math.max(0, width - ratio), height - ratio);
    context.restore();
    return;
  }
  context.fillStyle = paint.color;
  context.fillRect(left, top, width, height);
  if (LINES[paint.pattern]) {
    patterns[paint.pattern] ??= makePattern(context, paint.pattern, ratio);
    context.fillStyle = patterns[paint.pattern];
    context.fillRect(left, top, width, height);
  }
  if (paint.outline && width > 3 * ratio) {
    context.strokeStyle = "#767676";
    context.lineWidth = ratio;
    context.strokeRect(left + ratio / 2, top + ratio / 2, width - ratio, height - ratio);
  }
}

/** A word in a box (device pixels), if it fits. */
function write(context, ratio, text, left, top, width, height) {
  context.font = `${Math.min(11, height / ratio - 2) * ratio}px sans-serif`;
  if (context.measureText(text).width > width - 4 * ratio) return;
  Object.assign(context, { textAlign: "center", textBaseline: "middle", lineWidth: 2.5 * ratio, lineJoin: "round" });
  context.strokeStyle = "#222";
  context.strokeText(text, left + width / 2, top + height / 2 + ratio / 2);
  context.fillStyle = "#fff";
  context.fillText(text, left + width / 2, top + height / 2 + ratio / 2);
}

function element(tag, className, properties = {}) {
  return Object.assign(document.createElement(tag), { className, ...properties });
}

function fit(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(height * ratio))];
  if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
  canvas.style.height = `${height}px`;
  return ratio;
}

const AXIS = 22; // pixels below the rows
const STEP_ROW = 20; // of a rank in a pipeline's step
const part = (name, tag = "div", properties = {}) => element(tag, `axon-timeline-${name}`, properties);

function build(config, el) {
  const { ranks, title, paints } = config;
  const { height } = geometry(ranks.length);
  const root = element("div", "axon-timeline");
  root.style.setProperty("--axon-row", `${height}px`);
  const head = part("head");
  const elapsed = part("muted", "span");
  const legend = part("legend", "span");
  const tools = part("tools", "span");
  const filter = element("input", "", { type: "search", placeholder: "filter: all_reduce rank:2", ariaLabel: "filter spans" });
  tools.append(filter);
  const buttons = [
    ["+", "+", "Zoom in (+)"],
    ["−", "-", "Zoom out (−)"],
    ["cell", "Home", "Show the cell that runs, or the last one (Home)"],
    ["all", "a", "Show everything (a)"],
    ["save", "save", "Save as a trace for Perfetto"],
  ];
  for (const [textContent, value, hint] of buttons) {
    tools.append(element("button", "", { type: "button", textContent, value, title: hint, ariaLabel: hint }));
  }
  head.append(element("b", "", { textContent: title || "Timeline" }), elapsed, tools);
  const keys = paints.map((paint) => {
    const canvas = element("canvas", "");
    const item = part("key", "button", { type: "button", title: `hide or show: ${paint.label}`, hidden: true });
    item.setAttribute("aria-pressed", "true");
    item.append(canvas, paint.label);
    legend.append(item);
    return { item, canvas };
  });
  const names = part("names");
  names.setAttribute("aria-hidden", "true");
  for (const rank of ranks) names.append(element("div", "", { textContent: `rank ${rank}` }));
  const canvas = part("canvas", "canvas", { tabIndex: 0 });
  canvas.setAttribute("role", "img");
  const grid = part("grid");
  grid.append(names, canvas);
  const scroll = part("scroll");
  scroll.append(grid);
  const [steps, facts, note, tip, brush] = ["steps", "facts", "muted", "tip", "brush"].map((name) => part(name));
  const live = part("unseen");
  live.setAttribute("aria-live", "polite");
  tip.hidden = brush.hidden = true;
  root.append(head, legend, scroll, steps, facts, note, tip, brush, live);
  el.append(root);
  return { root, canvas, elapsed, filter, keys, steps, facts, note, tip, brush, live, tools };
}

/** A pipeline's last step: measured above ideal, the bubble between the boxes. */
function drawStep(canvas, step, rows, paints, ratio, width) {
  const context = canvas.getContext("2d");
  const [patterns, boxes] = [{}, []];
  const bubble = paints.find((paint) => paint.kind === "bubble");
  const scale = (width * ratio) / step.seconds;
  const several = new Set(rows.boxes.map((box) => box[4])).size > step.ranks.length;
  context.clearRect(0, 0, canvas.width, canvas.height);
  step.ranks.forEach((rank, row) => {
    let free = 0;
    const [top, tall] = [(row * STEP_ROW + 1) * ratio, (STEP_ROW - 3) * ratio];
    for (const [, start, length, code, stage, microbatch, action] of rows.boxes.filter((box) => box[0] === row).sort((a, b) => a[1] - b[1])) {
      if ((start - free) * scale > 2) {
        fill(context, bubble, patterns, ratio, free * scale, top, (start - free) * scale, tall);
        boxes.push({ row, from: free, to: start, words: `rank ${rank} · bubble, idle · ${duration(start - free)}` });
      }
      const wide = Math.max(1, length * scale - 0.5);
      fill(context, paints[code], patterns, ratio, start * scale, top, wide, tall);
      write(context, ratio, several ? `${stage}·${microbatch}` : String(microbatch), start * scale, top, wide, tall);
      free = start + length;
      const words = `rank ${rank} · ${paints[code].label} (${action}) · stage ${stage}, microbatch ${microbatch} · ${duration(length)}`;
      boxes.push({ row, from: start, to: free, words });
    }
  });
  return boxes;
}

function render({ model, el }, shared) {
  const config = model.get("config");
  const { ranks, paints } = config;
  const { store } = shared;
  const { height, cell, lanes } = geometry(ranks.length);
  const parts = build(config, el);
  const { root, canvas, live, tip, brush } = parts;
  const stop = new AbortController();
  const on = (target, name, handler) => target.addEventListener(name, handler, { signal: stop.signal });
  const off = new Set();
  let view = null;
  let pointer = null;
  let pressed = null;
  let chosen = null; // by keys: {row, lane, number}, the number of a span or -1
  let shown = new Uint8Array(0);
  let shownFor = "";
  let pending = 0;
  let facts = null;
  let pipelines = null;

  const window_ = () => visible(view, store, shared.now());
  const zero = () => store.focus[0] ?? extent(store, shared.now()).from;
  const known = () => ({ shown, ranks, config });

  function refilter() {
    const key = `${store.labels.length} ${Object.keys(store.groups).length} ${[...off]} ${parts.filter.value}`;
    if (key === shownFor) return;
    shownFor = key;
    shown = allowed(store, ranks, config, parts.filter.value, off);
  }

  function draw() {
    pending = 0;
    const width = Math.floor(canvas.clientWidth);
    if (!width || document.visibilityState === "hidden") return;
    refilter();
    const ratio = fit(canvas, width, ranks.length * height + AXIS);
    const context = canvas.getContext("2d");
    context.clearRect(0, 0, canvas.width, canvas.height);
    const { from, to } = window_();
    drawAxis(context, from, to, width, ratio);
    const pixels = Math.round(width * ratio);
    const { share, found } = shares(store, { ...known(), from, to, width: pixels });
    const patterns = {};
    const seen = new Set();
    for (let line = 0; line < 2 * ranks.length; line++) {
      const [offset, tall] = lanes[line % 2];
      const top = Math.round(((line >> 1) * height + offset) * ratio);
      for (const run of runs(share, line, pixels, paints.length)) {
        seen.add(run.kind);
        fill(context, paints[run.kind], patterns, ratio, run.left, top, run.right - run.left, Math.round(tall * ratio));
      }
    }
    drawCells(context, from, to, pixels, ratio);
    if (found < 3000) drawWords(context, from, to, pixels, ratio);
    if (chosen) mark(context, from, to, pixels, ratio);
    tell(from, to, found, seen);
    if (pointer) showTip();
  }

  function drawAxis(context, from, to, width, ratio) {
    const style = getComputedStyle(root);
    const bottom = ranks.length * height;
    Object.assign(context, { font: `${11 * ratio}px ${style.fontFamily}`, textBaseline: "middle", textAlign: "left" });
    for (const { x, label } of ticks(from, to, zero(), width)) {
      const at = Math.min(Math.round(x * ratio), context.canvas.width - 1);
      context.fillStyle = style.getPropertyValue("--axon-grid");
      context.fillRect(at, 0, Math.max(1, Math.round(ratio)), (bottom + 5) * ratio);
      context.fillStyle = style.color;
      const wide = context.measureText(label).width;
      context.fillText(label, Math.min(Math.max(0, at - wide / 2), context.canvas.width - wide), (bottom + 13) * ratio);
    }
  }

  /** Boxes of the spans that are on show, in device pixels. */
  function* boxes(from, to, pixels, ratio, wanted) {
    const { start, duration: length, label, rank } = store.columns;
    const rowOf = new Map(ranks.map((number, row) => [number, row]));
    const scale = pixels / (to - from);
    for (let i = store.skip; i < store.count; i++) {
      const { lane } = paints[store.labels[label[i]][0]];
      const row = rowOf.get(rank[i]);
      if (!wanted(lane) || row === undefined || !shown[label[i] * ranks.length + row]) continue;
      const left = Math.max(0, (start[i] - from) * scale);
      const right = Math.min(pixels, (start[i] + length[i] - from) * scale);
      if (right <= 0 || left >= pixels) continue;
      const [offset, tall] = lane < 0 ? cell : lanes[lane];
      yield { i, left, width: right - left, top: (row * height + offset) * ratio, height: tall * ratio };
    }
  }

  function drawCells(context, from, to, pixels, ratio) {
    context.fillStyle = paints[0].color;
    for (const box of boxes(from, to, pixels, ratio, (lane) => lane < 0)) {
      context.fillRect(box.left, box.top, Math.max(1, box.width), box.height);
    }
  }

  function drawWords(context, from, to, pixels, ratio) {
    for (const box of boxes(from, to, pixels, ratio, (lane) => lane >= 0)) {
      if (box.width < 26 * ratio || box.height < 10 * ratio) continue;
      const [, name] = store.labels[store.columns.label[box.i]];
      const stage = store.columns.stage[box.i];
      const text = stage >= 0 ? `${name} ${store.columns.microbatch[box.i]}` : name;
      write(context, ratio, text, box.left, box.top, box.width, box.height);
    }
  }

  function chosenIndex() {
    const i = chosen && chosen.number >= 0 ? chosen.number - store.first : -1;
    return i >= store.skip && i < store.count ? i : -1;
  }

  function mark(context, from, to, pixels, ratio) {
    const [offset, tall] = lanes[chosen.lane];
    const top = (chosen.row * height + offset) * ratio;
    context.strokeStyle = getComputedStyle(root).color;
    context.lineWidth = 2 * ratio;
    const i = chosenIndex();
    if (i < 0) {
      context.strokeRect(ratio, top - ratio, pixels - 2 * ratio, (tall + 2) * ratio);
      return;
    }
    const { start, duration: length } = store.columns;
    const scale = pixels / (to - from);
    context.strokeRect((start[i] - from) * scale - ratio, top - ratio, length[i] * scale + 2 * ratio, (tall + 2) * ratio);
  }

  function tell(from, to, found, seen) {
    const set = (node, text) => node.textContent !== text && (node.textContent = text);
    const spans = store.count - store.skip;
    const running = store.focus[0] !== null && store.focus[1] === null;
    const state = store.finished ? "" : shared.gone() ? " · no news from the kernel" : running ? " · live" : "";
    set(parts.elapsed, `${found.toLocaleString("en")} of ${spans.toLocaleString("en")} spans in ${duration(to - from)}${state}`);
    if (store.labels.some(([code]) => code === 0)) seen.add(0);
    if (store.pipelines.length) seen.add(paints.findIndex((paint) => paint.kind === "bubble"));
    parts.keys.forEach(({ item, canvas: swatch }, kind) => {
      if (item.hidden && !seen.has(kind)) return;
      item.hidden = false;
      const ratio = fit(swatch, 22, 12);
      const context = swatch.getContext("2d");
      context.clearRect(0, 0, swatch.width, swatch.height);
      const line = paints[kind].pattern === "line";
      fill(context, paints[kind], {}, ratio, 0, line ? 5 * ratio : 0, swatch.width, line ? 2 * ratio : swatch.height);
    });
    const notes = [];
    if (store.dropped) notes.push(`${store.dropped.toLocaleString("en")} older spans were dropped`);
    if (store.missing) notes.push(`${store.missing.toLocaleString("en")} older spans were not loaded again`);
    if (store.lost) notes.push(`${store.lost.toLocaleString("en")} spans came too fast to be taken`);
    set(parts.note, notes.join(" · "));
    if (store.facts !== facts) tellFacts((facts = store.facts));
    if (store.pipelines !== pipelines) tellSteps((pipelines = store.pipelines));
    canvas.ariaLabel = `Timeline of ${ranks.length} ranks, ${spans} spans. Plus and minus zoom, left and right move, up and down choose a rank, n and p go from span to span, Home shows the last cell, a everything.`;
    Object.assign(canvas.dataset, { spans, found, updates: store.updates, end: store.first + store.count, view: `${from.toFixed(6)},${to.toFixed(6)}` });
  }

  function tellFacts({ titles, rows, sentences }) {
    const table = element("table", "");
    const line = (cells, tag) => {
      const row = element("tr", "");
      cells.forEach((text, i) => {
        const cell_ = element(i ? tag : "th", "", { textContent: text });
        if (tag === "th" || !i) cell_.scope = tag === "th" ? "col" : "row";
        row.append(cell_);
      });
      return row;
    };
    table.append(line(["", ...titles], "th"), ...rows.map(([rank, ...cells]) => line([`rank ${rank}`, ...cells], "td")));
    parts.facts.replaceChildren(...sentences.map((text) => element("div", "", { textContent: text })), table);
  }

  function tellSteps(steps) {
    const shownSteps = steps.flatMap((step) => {
      const box = part("step");
      box.append(element("div", "", { textContent: step.words[0].toUpperCase() + step.words.slice(1) }));
      for (const rows of step.rows) {
        const line = part("step-row");
        const name = element("span", "", { textContent: `${rows.title}, bubble ${rows.bubble}` });
        const drawn = element("canvas", "");
        drawn.setAttribute("role", "img");
        drawn.ariaLabel = `${rows.title}: ranks ${step.ranks.join(", ")} from the top, bubble ${rows.bubble}`;
        line.append(name, drawn);
        box.append(line);
        drawn.again = () => {
          const width = drawn.clientWidth;
          const ratio = fit(drawn, width, step.ranks.length * STEP_ROW);
          drawn.boxes = drawStep(drawn, step, rows, paints, ratio, width);
        };
        on(drawn, "pointermove", (event) => {
          const time = (event.offsetX / drawn.clientWidth) * step.seconds;
          const row = Math.floor(event.offsetY / STEP_ROW);
          const found = drawn.boxes.find((box_) => box_.row === row && box_.from <= time && time <= box_.to);
          say(found?.words ?? "", drawn.offsetLeft + event.offsetX, drawn.offsetTop + event.offsetY);
        });
        on(drawn, "pointerleave", () => say(""));
      }
      if (step.cut) box.append(part("muted", "div", { textContent: `${step.cut} more boxes are left out` }));
      return [box];
    });
    parts.steps.replaceChildren(...shownSteps);
    parts.steps.querySelectorAll("canvas").forEach((drawn) => drawn.again());
  }

  function say(text, x = 0, y = 0) {
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    tip.style.left = `${Math.max(0, Math.min(x + 12, root.clientWidth - tip.offsetWidth))}px`;
    tip.style.top = `${y + 16}px`;
  }

  function placeOf(y) {
    const row = Math.floor(y / height);
    return { row, lane: y - row * height < lanes[1][0] ? 0 : 1 };
  }

  function timeAt(x) {
    const { from, to } = window_();
    return from + (Math.min(Math.max(0, x), canvas.clientWidth) / canvas.clientWidth) * (to - from);
  }

  function showTip() {
    const { row, lane } = placeOf(pointer.y);
    const { from, to } = window_();
    const near = (2 * (to - from)) / canvas.clientWidth;
    const at = { ...known(), rank: ranks[row], row, lane, time: timeAt(pointer.x), near };
    const i = row < ranks.length ? hit(store, at) : -1;
    const left = canvas.offsetLeft + pointer.x - canvas.parentNode.parentNode.scrollLeft;
    say(i < 0 ? "" : describe(store, i, config, zero()), left, canvas.offsetTop + pointer.y - canvas.parentNode.parentNode.scrollTop);
  }

  function showBrush() {
    brush.hidden = pressed === null || !pointer || Math.abs(pointer.x - pressed) < 4;
    if (brush.hidden) return;
    const [left, right] = [Math.min(pressed, pointer.x), Math.max(pressed, pointer.x)];
    brush.style.left = `${canvas.offsetLeft + left}px`;
    brush.style.width = `${right - left}px`;
    brush.style.top = `${canvas.offsetTop}px`;
    brush.style.height = `${Math.min(ranks.length * height, canvas.parentNode.parentNode.clientHeight)}px`;
  }

  function request() {
    pending ||= requestAnimationFrame(draw);
  }

  function choose(key) {
    const { from, to } = window_();
    const { row, lane } = chosen ?? { row: 0, lane: 0 };
    const i = chosenIndex();
    if (key === "ArrowUp" || key === "ArrowDown") {
      const line = chosen ? row * 2 + lane + (key === "ArrowDown" ? 1 : -1) : 0;
      const next = Math.min(Math.max(0, line), 2 * ranks.length - 1);
      chosen = { row: next >> 1, lane: next % 2, number: -1 };
      live.textContent = `rank ${ranks[chosen.row]}, ${chosen.lane ? "communication" : "its code"}`;
    } else {
      const way = key === "n" ? 1 : -1;
      const time = i >= 0 ? store.columns.start[i] : way > 0 ? from - 1e-9 : to;
      const place = { ...known(), rank: ranks[row], row, lane };
      let next = neighbour(store, { ...place, time, way });
      if (next < 0 && i < 0) next = neighbour(store, { ...place, time, way: -way });
      if (next < 0) return;
      chosen = { row, lane, number: store.first + next };
      const at = store.columns.start[next];
      if (at < from || at + store.columns.duration[next] > to) view = { from: at - (to - from) / 4, to: at + (3 * (to - from)) / 4 };
      else if (view?.follow) view = { from, to }; // it stays in sight
      const words = describe(store, next, config, zero());
      live.textContent = words;
      say(words, canvas.offsetLeft + Math.max(0, ((at - window_().from) / (to - from)) * canvas.clientWidth), canvas.offsetTop + row * height);
    }
    request();
  }

  function go(key) {
    if (["ArrowUp", "ArrowDown", "n", "p"].includes(key)) return choose(key), true;
    if (key === "Escape" && chosen) {
      chosen = null;
      say("");
      request();
      return true;
    }
    const step = navigate(view, key, store, shared.now());
    if (!step) return false;
    view = step.view;
    const { from, to } = window_();
    live.textContent = `showing ${duration(to - from)} from ${(from - zero()).toFixed(3)} seconds on`;
    request();
    return true;
  }

  function save() {
    const blob = new Blob([JSON.stringify(chromeTrace(store, config))], { type: "application/json" });
    const link = element("a", "", { href: URL.createObjectURL(blob), download: "timeline.json" });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  on(canvas, "keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !go(event.key)) return;
    event.preventDefault();
    event.stopPropagation();
  });
  on(parts.filter, "keydown", (event) => event.stopPropagation()); // Lab has keys of its own
  on(parts.filter, "input", request);
  on(parts.tools, "click", (event) => {
    if (event.target.value === "save") save();
    else if (event.target.tagName === "BUTTON") go(event.target.value);
  });
  parts.keys.forEach(({ item }, kind) =>
    on(item, "click", () => {
      const name = paints[kind].kind;
      off.has(name) ? off.delete(name) : off.add(name);
      item.setAttribute("aria-pressed", String(!off.has(name)));
      request();
    }),
  );
  on(canvas, "pointermove", (event) => {
    pointer = { x: event.offsetX, y: event.offsetY };
    showBrush();
    showTip();
  });
  on(canvas, "pointerleave", () => {
    pointer = null;
    say("");
  });
  on(canvas, "pointerdown", (event) => {
    if (event.button !== 0) return;
    pressed = event.offsetX;
    canvas.setPointerCapture(event.pointerId);
  });
  on(canvas, "pointerup", (event) => {
    if (pressed !== null && Math.abs(event.offsetX - pressed) >= 4) {
      const [from, to] = [timeAt(Math.min(pressed, event.offsetX)), timeAt(Math.max(pressed, event.offsetX))];
      if (to - from > NARROWEST) view = { from, to };
    }
    pressed = null;
    showBrush();
    request();
  });
  on(canvas, "pointercancel", () => {
    pressed = null;
    showBrush();
  });
  on(canvas, "dblclick", () => go("Home"));
  stop.signal.addEventListener("abort", () => canvas.removeEventListener("wheel", wheel));
  const wheel = (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    view = zoomAt(window_(), timeAt(event.offsetX), event.deltaY < 0 ? 0.8 : 1.25);
    request();
  };
  canvas.addEventListener("wheel", wheel, { passive: false });
  const again = () => {
    request();
    parts.steps.querySelectorAll("canvas").forEach((drawn) => drawn.again());
  };
  const here = () => shared.here(root);
  on(document, "visibilitychange", () => {
    here();
    request();
  });
  const resized = new ResizeObserver(again);
  resized.observe(root);
  const themed = new MutationObserver(again);
  themed.observe(document.body, { attributes: true });
  const timers = [setInterval(() => !store.finished && request(), 500), setInterval(here, HERE_MS)];
  shared.views.set(root, request);
  here();
  request();
  return () => {
    stop.abort();
    timers.forEach(clearInterval);
    cancelAnimationFrame(pending);
    resized.disconnect();
    themed.disconnect();
    shared.views.delete(root);
  };
}

const HERE_MS = 4000;
const GONE = 15; // seconds without a message, which the kernel sends at least every 5, after which it must be gone

function initialize({ model }) {
  const store = newStore();
  const views = new Map();
  let heard = performance.now();
  let closed = false;
  const quiet = () => (performance.now() - heard) / 1000;
  const gone = () => !store.finished && (closed || quiet() > GONE);
  const now = () => (store.finished || gone() ? store.now : store.now + quiet());
  const seen = () => !document.hidden && [...views.keys()].some((root) => root.isConnected);
  const here = (root) => !document.hidden && root.isConnected && !store.finished && model.send({ op: "here" });
  const take = (message) => {
    const whole = merge(store, decode(message));
    heard = performance.now();
    if (!whole) model.send({ op: "resend" });
    else if (seen()) model.send({ op: "seen" });
    views.forEach((request) => request());
  };
  const onMessage = (message, buffers) => message.op === "append" && take(buffers[0]);
  const snapshot = model.get("snapshot");
  if (snapshot?.byteLength) merge(store, decode(snapshot));
  model.on("msg:custom", onMessage);
  const onClosed = () => {
    closed = true;
    views.forEach((request) => request());
  };
  model.on("comm_live_update", onClosed);
  const close = () => {
    model.off("msg:custom", onMessage);
    model.off("comm_live_update", onClosed);
  };
  return { shared: { store, views, now, gone, here }, close };
}

export default () => {
  let shared = null;
  return {
    initialize(context) {
      const made = initialize(context);
      shared = made.shared;
      return made.close;
    },
    render: (context) => render(context, shared),
  };
};
