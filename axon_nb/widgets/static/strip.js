// The strip of `--watch`: what each rank does over time. First pure functions (tests/js runs them), then the view.

import { create, drawAxis, fill, fit, follow, onLook, pad, pointing, setText, unpack, widget } from "./common.js";

// ---- what the kernel sends: see axon_nb/widgets/wire.py ------------------------------------------------------------

export function decode(view) {
  const { header, take } = unpack(view);
  const columns = {};
  const all = (Type, ...names) => names.forEach((name) => (columns[name] = take(Type, header.count)));
  all(Float64Array, "start", "end", "since");
  all(Uint32Array, "position", "line", "low", "high");
  all(Uint16Array, "row", "call");
  all(Uint8Array, "activity", "mixed");
  return { header, columns };
}

export function newStore(numRows) {
  const rows = Array.from({ length: numRows }, () => ({ generation: 0, segments: [] }));
  return { rows, now: 0, lost: 0, coarse: 0, finished: false };
}

/** Take a message in; false when an earlier one is missing, so that everything has to be sent again. */
export function merge(store, { header, columns }) {
  let whole = true;
  for (const row of header.replaced) {
    store.rows[row].segments.length = 0;
    store.rows[row].generation = header.generations[row];
  }
  for (let i = 0; i < header.count; i++) {
    const row = columns.row[i];
    const { generation, segments } = store.rows[row];
    const position = columns.position[i];
    if (generation !== header.generations[row] || position > segments.length) {
      whole = false;
      continue;
    }
    segments[position] = {
      start: columns.start[i],
      end: columns.end[i],
      since: columns.since[i],
      line: columns.line[i],
      low: columns.low[i],
      high: columns.high[i],
      call: header.calls[columns.call[i]],
      activity: columns.activity[i],
      mixed: columns.mixed[i] === 1,
    };
  }
  const { now, lost, coarse, finished } = header;
  Object.assign(store, { now, lost, coarse, finished });
  return whole;
}

// ---- words ---------------------------------------------------------------------------------------------------------

export function seconds(value) {
  if (value < 0.995) return `${value.toFixed(2)} s`;
  if (value < 99.95) return `${value.toFixed(1)} s`;
  const whole = Math.round(value);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${pad(whole % 60)} s`;
  const minutes = Math.round(value / 60);
  return `${Math.floor(minutes / 60)} h ${pad(minutes % 60)} min`;
}

/** Where a row's last segment ends: it goes on while samples come in, and for good once the rank is through. */
export function openEnd(segment, now, config) {
  const goesOn = config.paints[segment.activity].terminal || now - segment.end <= config.silence;
  return goesOn ? Math.max(now, segment.end) : segment.end;
}

/** A rank's present state, such as `waiting in all_reduce, line 4, 2.1 s`. */
export function describe(segments, now, config) {
  const segment = segments[segments.length - 1];
  if (!segment) return "no sample yet";
  const name = config.paints[segment.activity].name;
  if (name === "done" || name === "failed") return `${name} after ${seconds(segment.start)}`;
  if (name === "dead") return `died after ${seconds(segment.start)}`;
  const end = openEnd(segment, now, config);
  const line = segment.line ? `, line ${segment.line}` : "";
  const silent = end < now ? `, no sample for ${seconds(now - end)}` : "";
  if (name === "waiting") return `waiting in ${segment.call}${line}, ${seconds(end - segment.since)}${silent}`;
  if (name === "collective") return `in ${segment.call}${line}${silent}`;
  return `${name}${name === "running" ? line : ""}${silent}`;
}

/** One segment in full, for the tooltip. */
export function explain(rank, segment, end, config) {
  const { name } = config.paints[segment.activity];
  const what = segment.call ? `${name === "waiting" ? "waiting in" : "in"} ${segment.call}` : name;
  const lines = segment.low === segment.high ? `, line ${segment.low}` : `, lines ${segment.low}–${segment.high}`;
  const where = segment.low ? lines : "";
  const span = `${segment.start.toFixed(2)}–${end.toFixed(2)} s (${seconds(end - segment.start)})`;
  return `rank ${rank} · ${segment.mixed ? "mostly " : ""}${what}${where} · ${span}`;
}

// ---- layout --------------------------------------------------------------------------------------------------------

const SHORTEST = 5; // seconds that the axis spans at least, so that the first samples do not fill it
const STEPS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400];

/** The stretch of time on show; a view of null is everything, one that follows keeps to the newest. */
export function visible(view, now) {
  if (!view) return { from: 0, to: Math.max(now, SHORTEST) };
  return view.follow ? { from: Math.max(0, now - view.span), to: Math.max(now, view.span) } : view;
}

/** The view after a key, or null where the key means nothing here. */
export function navigate(view, key, now) {
  const { from, to } = visible(view, now);
  const span = to - from;
  const latest = !view || view.follow;
  const shift = (by) => {
    const start = Math.min(Math.max(0, from + by), Math.max(0, now - span));
    return start + span >= now ? { follow: true, span } : { from: start, to: start + span };
  };
  if (key === "+" || key === "=") {
    const narrow = Math.max(span / 2, 0.05);
    if (latest) return { view: { follow: true, span: narrow } };
    const middle = (from + to) / 2;
    return { view: { from: middle - narrow / 2, to: middle + narrow / 2 } };
  }
  if (key === "-" || key === "_") {
    if (2 * span >= Math.max(now, SHORTEST)) return { view: null };
    if (latest) return { view: { follow: true, span: 2 * span } };
    const start = Math.min(Math.max(0, from - span / 2), now - 2 * span);
    return { view: { from: start, to: start + 2 * span } };
  }
  if (key === "ArrowLeft") return { view: view ? shift(-span / 5) : null };
  if (key === "ArrowRight") return { view: view ? shift(span / 5) : null };
  if (key === "End") return { view: view ? { follow: true, span } : null };
  if (key === "Home") return { view: null };
  return null;
}

export function ticks(from, to, width) {
  const most = Math.max(2, width / 90);
  const step = STEPS.find((candidate) => (to - from) / candidate <= most) ?? 86400;
  const found = [];
  for (let i = Math.ceil(from / step - 1e-9); i * step <= to + 1e-9; i++) {
    const at = i * step;
    found.push({ at, x: ((at - from) / (to - from)) * width, label: clock(at, step) });
  }
  return found;
}

function clock(at, step) {
  if (at < 60) return `${at.toFixed(step < 0.1 ? 2 : step < 1 ? 1 : 0)} s`;
  const whole = Math.floor(at + 1e-9);
  const rest = step < 1 ? (at % 60).toFixed(step < 0.1 ? 2 : 1).padStart(step < 0.1 ? 5 : 4, "0") : pad(whole % 60);
  const minutes = Math.floor(whole / 60);
  return minutes < 60 ? `${minutes}:${rest}` : `${Math.floor(minutes / 60)}:${pad(minutes % 60)}:${rest}`;
}

function firstEndingAfter(segments, time) {
  let low = 0;
  let high = segments.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (segments[middle].end < time) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** What a row shows in each pixel: the activity that takes most of its time, as runs of pixels {left, right, activity}. */
export function runs(segments, { from, to, width, now, config }) {
  const kinds = config.paints.length;
  const scale = width / (to - from);
  const share = new Float32Array(width * kinds);
  const last = segments.length - 1;
  // An open last segment ends before `from` by its last sample, yet may reach into the view.
  for (let i = Math.min(firstEndingAfter(segments, from), Math.max(0, last)); i <= last; i++) {
    const segment = segments[i];
    if (segment.start > to) break;
    const left = Math.max(0, (segment.start - from) * scale);
    const right = Math.min(width, ((i === last ? openEnd(segment, now, config) : segment.end) - from) * scale);
    for (let x = Math.floor(left); x < right; x++) {
      share[x * kinds + segment.activity] += Math.min(right, x + 1) - Math.max(left, x);
    }
  }
  const found = [];
  let current = null;
  for (let x = 0; x < width; x++) {
    let activity = -1;
    let most = 0.02;
    for (let kind = 0; kind < kinds; kind++) {
      if (share[x * kinds + kind] > most) [most, activity] = [share[x * kinds + kind], kind];
    }
    if (current && current.activity === activity) current.right = x + 1;
    else if (activity >= 0) found.push((current = { left: x, right: x + 1, activity }));
    else current = null;
  }
  return found;
}

/** The segment of a row at a time, with the end that is on show; null where nothing is known. */
export function hit(segments, time, now, config) {
  const last = segments.length - 1;
  const i = Math.min(firstEndingAfter(segments, time), last);
  if (i < 0 || segments[i].start > time) return null;
  const end = i === last ? openEnd(segments[i], now, config) : segments[i].end;
  return time <= end ? { segment: segments[i], end } : null;
}

export function rowHeight(numRows) {
  return numRows <= 8 ? 24 : numRows <= 24 ? 18 : 14;
}

const LONG_WAIT = 5; // seconds in one call that are worth a word

/** What deserves to be read out: ranks that failed, died or wait for long, each once. `told` remembers. */
export function news(store, ranks, now, config, told) {
  const found = [];
  store.rows.forEach(({ segments }, row) => {
    const segment = segments[segments.length - 1];
    if (!segment) return;
    const { name } = config.paints[segment.activity];
    const worth =
      name === "failed" || name === "dead" || (name === "waiting" && now - segment.since > LONG_WAIT) ? name : "";
    if (worth && told.get(row) !== worth) found.push(`rank ${ranks[row]} ${describe(segments, now, config)}`);
    told.set(row, worth);
  });
  return found.join("; ");
}

// ---- drawing -------------------------------------------------------------------------------------------------------

const AXIS = 22; // pixels below the rows

function build(model, el) {
  const { ranks, title, paints } = model.get("config");
  const height = rowHeight(ranks.length);
  const part = (name, tag = "div") => create(tag, `axon-view-${name} axon-strip-${name}`);
  const root = create("div", "axon-view axon-strip");
  root.style.setProperty("--axon-row", `${height}px`);
  const head = part("head");
  const elapsed = create("span", "axon-view-muted axon-strip-elapsed");
  const legend = part("legend", "span");
  const tools = part("tools", "span");
  head.append(create("b", "", { textContent: title }), elapsed, legend, tools);
  const buttons = [["+", "+", "Zoom in (+)"], ["−", "-", "Zoom out (-)"], ["all", "Home", "Show everything (Home)"]];
  for (const [textContent, value, hint] of buttons) {
    tools.append(create("button", "", { type: "button", textContent, value, title: hint, ariaLabel: hint }));
  }
  const swatches = paints.map((paint) => {
    const item = part("key", "span");
    const canvas = create("canvas", "");
    item.append(canvas, paint.label);
    item.hidden = true;
    legend.append(item);
    return { item, canvas };
  });
  const names = part("names");
  names.setAttribute("aria-hidden", "true");
  const states = part("states");
  states.setAttribute("role", "list");
  const words = ranks.map((rank) => {
    names.append(create("div", "", { textContent: `rank ${rank}` }));
    const item = create("div", "");
    item.setAttribute("role", "listitem");
    const text = create("span", "");
    item.append(create("span", "axon-view-unseen", { textContent: `rank ${rank}: ` }), text);
    states.append(item);
    return text;
  });
  const canvas = create("canvas", "axon-strip-canvas", { tabIndex: 0 });
  canvas.setAttribute("role", "img");
  const grid = part("grid");
  grid.append(names, canvas, states);
  const [note, tip, brush, live] = [create("div", "axon-view-muted"), part("tip"), part("brush"), part("unseen")];
  live.setAttribute("aria-live", "polite");
  tip.hidden = brush.hidden = true;
  root.append(head, grid, note, tip, brush, live);
  el.append(root);
  return { root, canvas, elapsed, swatches, words, note, tip, brush, live, tools, height };
}

function render({ model, el }, shared) {
  const config = model.get("config");
  const { ranks, paints } = config;
  const { store } = shared;
  const parts = build(model, el);
  const { root, canvas, live, tip, brush, height } = parts;
  const stop = new AbortController();
  const on = (target, name, handler) => target.addEventListener(name, handler, { signal: stop.signal });
  const told = new Map();
  let view = null;
  let pointer = null;
  let announced = 0;
  let pending = 0;

  function draw() {
    pending = 0;
    const width = canvas.clientWidth;
    if (!width || document.visibilityState === "hidden") return;
    const now = shared.now();
    const ratio = fit(canvas, width, ranks.length * height + AXIS);
    const context = canvas.getContext("2d");
    const { from, to } = visible(view, now);
    context.clearRect(0, 0, canvas.width, canvas.height);
    const patterns = {};
    const seen = new Set();
    drawAxis(canvas, root, ticks(from, to, width), { bottom: ranks.length * height, ratio });
    store.rows.forEach(({ segments }, row) => {
      for (const run of runs(segments, { from, to, width: canvas.width, now, config })) {
        seen.add(run.activity);
        const [top, tall] = [Math.round((row * height + 3) * ratio), Math.round((height - 6) * ratio)];
        fill(context, paints[run.activity], patterns, ratio, run.left, top, run.right - run.left, tall);
      }
    });
    tell(now, from, to, seen);
    if (pointer) showTip();
  }

  function tell(now, from, to, seen) {
    store.rows.forEach(({ segments }, row) => {
      const text = describe(segments, now, config);
      setText(parts.words[row], text);
      parts.words[row].parentNode.title = text;
    });
    const prefix = store.finished ? "ended after " : shared.gone() ? "no news from the kernel since " : "";
    setText(parts.elapsed, prefix + seconds(now));
    parts.swatches.forEach(({ item, canvas: swatch }, kind) => {
      if (item.hidden && !seen.has(kind)) return;
      item.hidden = false;
      const ratio = fit(swatch, 22, 12);
      fill(swatch.getContext("2d"), paints[kind], {}, ratio, 0, 0, swatch.width, swatch.height);
    });
    const notes = [];
    if (store.coarse) notes.push(`before ${seconds(store.coarse)} short stretches are merged`);
    if (store.lost) notes.push(`${store.lost} sample${store.lost === 1 ? "" : "s"} lost`);
    setText(parts.note, notes.join(" · "));
    canvas.ariaLabel ||=
      `Activity of ${ranks.length} ranks over time. Plus and minus zoom, arrows move, Home shows everything.`;
    Object.assign(canvas.dataset, {
      segments: store.rows.reduce((sum, { segments }) => sum + segments.length, 0),
      now: now.toFixed(2),
      view: `${from.toFixed(3)},${to.toFixed(3)}`,
    });
    if (performance.now() - announced > 5000) {
      const text = news(store, ranks, now, config, told);
      if (text) say(text);
    }
  }

  function say(text) {
    announced = performance.now();
    live.textContent = text;
  }

  function go(key) {
    const step = navigate(view, key, shared.now());
    if (!step) return false;
    view = step.view;
    const { from, to } = visible(view, shared.now());
    say(`showing ${from.toFixed(1)} to ${to.toFixed(1)} seconds`);
    request();
    return true;
  }

  function timeAt(x) {
    const { from, to } = visible(view, shared.now());
    return from + (Math.min(Math.max(0, x), canvas.clientWidth) / canvas.clientWidth) * (to - from);
  }

  function showTip() {
    const row = pointer ? Math.floor(pointer.y / height) : ranks.length;
    const found = row < ranks.length && hit(store.rows[row].segments, timeAt(pointer.x), shared.now(), config);
    tip.hidden = !found;
    if (!found) return;
    tip.textContent = explain(ranks[row], found.segment, found.end, config);
    const [left, top] = [canvas.offsetLeft + pointer.x + 12, canvas.offsetTop + pointer.y + 14];
    tip.style.left = `${Math.max(0, Math.min(left, root.clientWidth - tip.offsetWidth))}px`;
    tip.style.top = `${top}px`;
  }

  function request() {
    pending ||= requestAnimationFrame(draw);
  }

  on(canvas, "keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !go(event.key)) return;
    event.preventDefault();
    event.stopPropagation();
  });
  on(parts.tools, "click", (event) => event.target.value && go(event.target.value));
  pointing(on, canvas, brush, {
    height: () => ranks.length * height,
    moved(place) {
      pointer = place;
      showTip();
    },
    chose(left, right) {
      const [from, to] = [timeAt(left), timeAt(right)];
      if (to - from > 0.01) view = { from, to };
      request();
    },
  });
  on(canvas, "dblclick", () => go("Home"));
  on(document, "visibilitychange", request);
  const unlook = onLook(root, request);
  // Bars and waits grow between messages too, and a rank that falls silent sends none.
  const timer = setInterval(() => !store.finished && request(), 250);
  shared.views.add(request);
  request();
  return () => {
    stop.abort();
    clearInterval(timer);
    cancelAnimationFrame(pending);
    unlook();
    shared.views.delete(request);
  };
}

function initialize({ model }) {
  const store = newStore(model.get("config").ranks.length);
  const views = new Set();
  const take = (message) => merge(store, decode(message));
  const changed = () => views.forEach((request) => request());
  const { now, gone, close } = follow(model, store, { take, changed });
  return { shared: { store, views, now, gone }, close };
}

export default widget(initialize, render);
