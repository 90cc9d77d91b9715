// The timeline of `%timeline`: spans by rank, live; pipelines beside their ideal.

import { create, drawAxis, fill, fit, follow, onLook, pointing, sayHere, setText, widget } from "./common.js";
import {
  NARROWEST, allowed, chromeTrace, decode, describe, duration, extent, geometry, hit, merge, navigate, neighbour, newStore,
  runs, shares, ticks, visible, zoomAt,
} from "./spans.js";

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

const AXIS = 22; // pixels below the rows
const STEP_ROW = 20; // of a rank in a pipeline's step
const part = (name, tag = "div", properties = {}) => create(tag, `axon-view-${name} axon-timeline-${name}`, properties);

function build(config, el) {
  const { ranks, title, paints } = config;
  const { height } = geometry(ranks.length);
  const root = create("div", "axon-view axon-timeline");
  root.style.setProperty("--axon-row", `${height}px`);
  const head = part("head");
  const elapsed = part("muted", "span");
  const legend = part("legend", "span");
  const tools = part("tools", "span");
  const filter = create("input", "", { type: "search", placeholder: "filter: all_reduce rank:2", ariaLabel: "filter spans" });
  tools.append(filter);
  const buttons = [
    ["+", "+", "Zoom in (+)"],
    ["−", "-", "Zoom out (−)"],
    ["cell", "Home", "Show the cell that runs, or the last one (Home)"],
    ["all", "a", "Show everything (a)"],
    ["save", "save", "Save as a trace for Perfetto"],
  ];
  for (const [textContent, value, hint] of buttons) {
    tools.append(create("button", "", { type: "button", textContent, value, title: hint, ariaLabel: hint }));
  }
  head.append(create("b", "", { textContent: title || "Timeline" }), elapsed, tools);
  const keys = paints.map((paint) => {
    const canvas = create("canvas", "");
    const item = part("key", "button", { type: "button", title: `hide or show: ${paint.label}`, hidden: true });
    item.setAttribute("aria-pressed", "true");
    item.append(canvas, paint.label);
    legend.append(item);
    return { item, canvas };
  });
  const names = part("names");
  names.setAttribute("aria-hidden", "true");
  for (const rank of ranks) names.append(create("div", "", { textContent: `rank ${rank}` }));
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
  const scroll = canvas.parentNode.parentNode;
  const stop = new AbortController();
  const on = (target, name, handler) => target.addEventListener(name, handler, { signal: stop.signal });
  const off = new Set();
  let view = null;
  let pointer = null;
  let chosen = null; // by keys: {row, lane, number}, the number of a span or -1
  let shown = new Uint8Array(0);
  let shownFor = "";
  let pending = 0;
  let facts = null;
  let pipelines = null;
  let patterns = {};
  let patternsFor = 0;

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
    drawAxis(canvas, root, ticks(from, to, zero(), width), { bottom: ranks.length * height, ratio });
    const pixels = Math.round(width * ratio);
    const { share, found, cells, few } = shares(store, { ...known(), from, to, width: pixels });
    if (ratio !== patternsFor) [patterns, patternsFor] = [{}, ratio];
    const seen = new Set();
    for (let line = 0; line < 2 * ranks.length; line++) {
      const [offset, tall] = lanes[line % 2];
      const top = Math.round(((line >> 1) * height + offset) * ratio);
      for (const run of runs(share, line, pixels, paints.length)) {
        seen.add(run.kind);
        fill(context, paints[run.kind], patterns, ratio, run.left, top, run.right - run.left, Math.round(tall * ratio));
      }
    }
    context.fillStyle = paints[0].color;
    for (const box of boxes(cells, from, to, pixels, ratio)) {
      context.fillRect(box.left, box.top, Math.max(1, box.width), box.height);
    }
    if (few) drawWords(context, boxes(few, from, to, pixels, ratio), ratio);
    if (chosen) mark(context, from, to, pixels, ratio);
    tell(from, to, found, seen, ratio);
    if (pointer) showTip();
  }

  /** Boxes of some spans, in device pixels. */
  function* boxes(places, from, to, pixels, ratio) {
    const { start, duration: length, label, rank } = store.columns;
    const rowOf = new Map(ranks.map((number, row) => [number, row]));
    const scale = pixels / (to - from);
    for (const i of places) {
      const { lane } = paints[store.labels[label[i]][0]];
      const left = Math.max(0, (start[i] - from) * scale);
      const right = Math.min(pixels, (start[i] + length[i] - from) * scale);
      if (right <= 0 || left >= pixels) continue;
      const [offset, tall] = lane < 0 ? cell : lanes[lane];
      const top = (rowOf.get(rank[i]) * height + offset) * ratio;
      yield { i, left, width: right - left, top, height: tall * ratio };
    }
  }

  function drawWords(context, found, ratio) {
    for (const box of found) {
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

  function tell(from, to, found, seen, ratio) {
    const spans = store.count - store.skip;
    const running = store.focus[0] !== null && store.focus[1] === null;
    const state = store.finished ? "" : shared.gone() ? " · no news from the kernel" : running ? " · live" : "";
    setText(parts.elapsed, `${found.toLocaleString("en")} of ${spans.toLocaleString("en")} spans in ${duration(to - from)}${state}`);
    if (store.labels.some(([code]) => code === 0)) seen.add(0);
    if (store.pipelines.length) seen.add(paints.findIndex((paint) => paint.kind === "bubble"));
    parts.keys.forEach(({ item, canvas: swatch }, kind) => {
      const known_ = Number(swatch.dataset.ratio) === ratio;
      if (known_ || (item.hidden && !seen.has(kind))) return;
      item.hidden = false;
      swatch.dataset.ratio = ratio;
      fit(swatch, 22, 12);
      const line = paints[kind].pattern === "line";
      fill(swatch.getContext("2d"), paints[kind], {}, ratio, 0, line ? 5 * ratio : 0, swatch.width, line ? 2 * ratio : swatch.height);
    });
    const notes = [];
    if (store.dropped) notes.push(`${store.dropped.toLocaleString("en")} older spans were dropped`);
    if (store.missing) notes.push(`${store.missing.toLocaleString("en")} older spans were not loaded again`);
    if (store.lost) notes.push(`${store.lost.toLocaleString("en")} spans came too fast to be taken`);
    setText(parts.note, notes.join(" · "));
    if (store.facts !== facts) tellFacts((facts = store.facts));
    if (store.pipelines !== pipelines) tellSteps((pipelines = store.pipelines));
    const said = `Timeline of ${ranks.length} ranks. Plus and minus zoom, left and right move, up and down choose a rank, n and p go from span to span, Home shows the last cell, a everything.`;
    if (canvas.ariaLabel !== said) canvas.ariaLabel = said;
    Object.assign(canvas.dataset, { spans, found, updates: store.updates, end: store.first + store.count, view: `${from.toFixed(6)},${to.toFixed(6)}` });
  }

  function tellFacts({ titles, rows, sentences }) {
    const table = create("table", "");
    const line = (cells, tag) => {
      const row = create("tr", "");
      cells.forEach((text, i) => {
        const cell_ = create(i ? tag : "th", "", { textContent: text });
        if (tag === "th" || !i) cell_.scope = tag === "th" ? "col" : "row";
        row.append(cell_);
      });
      return row;
    };
    table.append(line(["", ...titles], "th"), ...rows.map(([rank, ...cells]) => line([`rank ${rank}`, ...cells], "td")));
    parts.facts.replaceChildren(...sentences.map((text) => create("div", "", { textContent: text })), table);
  }

  function tellSteps(steps) {
    const shownSteps = steps.map((step) => {
      const box = part("step");
      box.append(create("div", "", { textContent: step.words[0].toUpperCase() + step.words.slice(1) }));
      for (const rows of step.rows) {
        const line = part("step-row");
        line.append(create("span", "", { textContent: `${rows.title}, bubble ${rows.bubble}` }), stepCanvas(step, rows));
        box.append(line);
      }
      if (step.cut) box.append(part("muted", "div", { textContent: `${step.cut} more boxes are left out` }));
      return box;
    });
    parts.steps.replaceChildren(...shownSteps);
    parts.steps.querySelectorAll("canvas").forEach((drawn) => drawn.again());
  }

  function stepCanvas(step, rows) {
    const drawn = create("canvas", "");
    drawn.setAttribute("role", "img");
    drawn.ariaLabel = `${rows.title}: ranks ${step.ranks.join(", ")} from the top, bubble ${rows.bubble}`;
    drawn.again = () => {
      const width = drawn.clientWidth;
      const ratio = fit(drawn, width, step.ranks.length * STEP_ROW);
      drawn.boxes = drawStep(drawn, step, rows, paints, ratio, width);
    };
    // Properties, as a signal would keep each listener, and so each canvas, as long as the view is there.
    drawn.onpointermove = (event) => {
      const time = (event.offsetX / drawn.clientWidth) * step.seconds;
      const row = Math.floor(event.offsetY / STEP_ROW);
      const found = drawn.boxes.find((box_) => box_.row === row && box_.from <= time && time <= box_.to);
      say(found?.words ?? "", drawn.offsetLeft + event.offsetX, drawn.offsetTop + event.offsetY);
    };
    drawn.onpointerleave = () => say("");
    return drawn;
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
    if (!pointer) return say("");
    const { row, lane } = placeOf(pointer.y);
    const { from, to } = window_();
    const near = (2 * (to - from)) / canvas.clientWidth;
    const at = { ...known(), rank: ranks[row], row, lane, time: timeAt(pointer.x), near };
    const i = row < ranks.length ? hit(store, at) : -1;
    const words = i < 0 ? "" : describe(store, i, config, zero());
    return say(words, canvas.offsetLeft + pointer.x - scroll.scrollLeft, canvas.offsetTop + pointer.y - scroll.scrollTop);
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
    const link = create("a", "", { href: URL.createObjectURL(blob), download: "timeline.json" });
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
  pointing(on, canvas, brush, {
    height: () => Math.min(ranks.length * height, scroll.clientHeight),
    moved(place) {
      pointer = place;
      showTip();
    },
    chose(left, right) {
      const [from, to] = [timeAt(left), timeAt(right)];
      if (to - from > NARROWEST) view = { from, to };
      request();
    },
  });
  on(canvas, "dblclick", () => go("Home"));
  const wheel = (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    view = zoomAt(window_(), timeAt(event.offsetX), event.deltaY < 0 ? 0.8 : 1.25);
    request();
  };
  canvas.addEventListener("wheel", wheel, { passive: false, signal: stop.signal });
  on(document, "visibilitychange", request);
  const unlook = onLook(root, () => {
    request();
    parts.steps.querySelectorAll("canvas").forEach((drawn) => drawn.again());
  });
  const unsay = sayHere(model, root, () => !store.finished);
  const timer = setInterval(() => !store.finished && request(), 500);
  shared.views.set(root, request);
  request();
  return () => {
    stop.abort();
    clearInterval(timer);
    cancelAnimationFrame(pending);
    unlook();
    unsay();
    shared.views.delete(root);
  };
}

function initialize({ model }) {
  const store = newStore();
  const views = new Map();
  const seen = () => !document.hidden && [...views.keys()].some((root) => root.isConnected);
  const { now, gone, close } = follow(model, store, {
    take: (message) => merge(store, decode(message)),
    took: () => seen() && model.send({ op: "seen", number: store.number }),
    changed: () => views.forEach((request) => request()),
  });
  return { shared: { store, views, now, gone }, close };
}

export default widget(initialize, render);
