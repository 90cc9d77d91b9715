// What the views share. Others import it; axon_nb/widgets/assets.py puts it in place of the import, as each view is one
// script in the page.

// ---- elements ------------------------------------------------------------------------------------------------------

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children. */
export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** The same in SVG. */
export function shape(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** An element with classes and properties. */
export function create(tag, className, properties = {}) {
  return Object.assign(document.createElement(tag), { className, ...properties });
}

/** Set an element's text, only where it differs: what is written anew is laid out anew, and read out again. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// ---- words ---------------------------------------------------------------------------------------------------------

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/** Bytes to three digits. */
export function size(bytes) {
  let unit = 0;
  for (; bytes >= 999.5 && unit < UNITS.length - 1; unit++) bytes /= 1024;
  return `${unit ? bytes.toPrecision(3) : Math.round(bytes)} ${UNITS[unit]}`;
}

/** A number with two digits. */
export function pad(number) {
  return String(number).padStart(2, "0");
}

// ---- what the kernel sends -----------------------------------------------------------------------------------------

/** A message of columns: its header, and a function that takes the next column. */
export function unpack(view) {
  const bytes = view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength);
  const length = new DataView(bytes).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 8, length)));
  let offset = 8 + length;
  const take = (Type, count) => {
    const column = new Type(bytes, offset, count);
    offset += count * Type.BYTES_PER_ELEMENT;
    return column;
  };
  return { header, take };
}

const GONE = 15; // seconds without a message, which the kernel sends at least every 5, after which it must be gone

/**
 * Keep a store up to date with what a kernel appends: `take(message)` says whether it fitted. `changed` is called after
 * each message, and when the kernel is gone.
 */
export function follow(model, store, { take, took = () => {}, changed }) {
  let heard = performance.now();
  let closed = false;
  const quiet = () => (performance.now() - heard) / 1000;
  const gone = () => !store.finished && (closed || quiet() > GONE);
  const now = () => (store.finished || gone() ? store.now : store.now + quiet());
  const onMessage = (message, buffers) => {
    if (message.op !== "append") return;
    const whole = take(buffers[0]);
    heard = performance.now();
    if (whole) took();
    else model.send({ op: "resend" });
    changed();
  };
  const onClosed = () => {
    closed = true;
    changed();
  };
  const snapshot = model.get("snapshot");
  if (snapshot?.byteLength && !take(snapshot)) model.send({ op: "resend" });
  model.on("msg:custom", onMessage);
  model.on("comm_live_update", onClosed);
  model.send({ op: "ready" }); // until then what is sent would be heard by nobody: after a reload the kernel waits for it
  const close = () => {
    model.off("msg:custom", onMessage);
    model.off("comm_live_update", onClosed);
  };
  return { now, gone, close };
}

/** A widget whose views share what `initialize` makes: {shared, close}. */
export function widget(initialize, render) {
  return () => {
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
}

// ---- a page that says that it is there -----------------------------------------------------------------------------

const SAY_HERE_MS = 4000;

/** Tell the kernel now and then that a page shows this view, as long as `wanted` says so. Returns what ends it. */
export function sayHere(model, root, wanted = () => true) {
  const here = () => {
    if (!document.hidden && root.isConnected && wanted()) model.send({ op: "here" });
  };
  const timer = setInterval(here, SAY_HERE_MS);
  document.addEventListener("visibilitychange", here);
  requestAnimationFrame(here); // only then is the root part of the page
  here();
  return () => {
    clearInterval(timer);
    document.removeEventListener("visibilitychange", here);
  };
}

// ---- canvases ------------------------------------------------------------------------------------------------------

const LINES = {
  rows: { color: "rgba(255,255,255,.75)", width: 1, paths: [[0, 2, 8, 2], [0, 6, 8, 6]] },
  bars: { color: "rgba(255,255,255,.45)", width: 1, paths: [[1.5, 0, 1.5, 8], [5.5, 0, 5.5, 8]] },
  dots: { color: "rgba(17,17,17,.7)", width: 2, paths: [[1, 2, 3, 2], [5, 6, 7, 6]] },
  hatch: { color: "rgba(17,17,17,.65)", width: 1.5, paths: [[-2, 2, 2, -2], [0, 8, 8, 0], [6, 10, 10, 6]] },
  cross: { color: "rgba(255,255,255,.6)", width: 1.3, paths: [[0, 0, 8, 8], [8, 0, 0, 8]] },
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

/** Fill a box (device pixels) with a paint: {color, pattern, outline}. `patterns` keeps what has been made. */
export function fill(context, paint, patterns, ratio, left, top, width, height) {
  context.fillStyle = context.strokeStyle = paint.color;
  context.lineWidth = ratio;
  if (paint.pattern === "line") {
    context.fillRect(left, top + height / 2 - ratio, width, 2 * ratio);
    return;
  }
  if (paint.pattern === "hollow" || paint.pattern === "dashed") {
    const inset = paint.pattern === "hollow" ? Math.round(height / 5) : ratio / 2;
    if (paint.pattern === "dashed") context.setLineDash([2 * ratio, 2 * ratio]);
    context.strokeRect(left + ratio / 2, top + inset, Math.max(0, width - ratio), height - 2 * inset);
    context.setLineDash([]);
    return;
  }
  context.fillRect(left, top, width, height);
  if (LINES[paint.pattern]) {
    patterns[paint.pattern] ??= makePattern(context, paint.pattern, ratio);
    context.fillStyle = patterns[paint.pattern];
    context.fillRect(left, top, width, height);
  }
  if (paint.outline && width > 3 * ratio) {
    context.strokeStyle = "#767676";
    context.strokeRect(left + ratio / 2, top + ratio / 2, width - ratio, height - ratio);
  }
}

/** Give a canvas its size; returns how many device pixels one of the page's is. */
export function fit(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(height * ratio))];
  if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
  canvas.style.height = `${height}px`;
  return ratio;
}

/** Ticks {x, label}, in pixels of the page, below rows that end at `bottom`. */
export function drawAxis(canvas, root, found, { bottom, ratio }) {
  const context = canvas.getContext("2d");
  const style = getComputedStyle(root);
  Object.assign(context, { font: `${11 * ratio}px ${style.fontFamily}`, textBaseline: "middle", textAlign: "left" });
  const [grid, ink] = [style.getPropertyValue("--axon-grid"), style.color];
  for (const { x, label } of found) {
    const at = Math.min(Math.round(x * ratio), canvas.width - 1);
    context.fillStyle = grid;
    context.fillRect(at, 0, Math.max(1, Math.round(ratio)), (bottom + 5) * ratio);
    context.fillStyle = ink;
    const wide = context.measureText(label).width;
    context.fillText(label, Math.min(Math.max(0, at - wide / 2), canvas.width - wide), (bottom + 13) * ratio);
  }
}

/** Draw again when the size or the theme changes. Returns what ends it. */
export function onLook(root, again) {
  const resized = new ResizeObserver(again);
  resized.observe(root);
  const themed = new MutationObserver(again);
  themed.observe(document.body, { attributes: true });
  return () => {
    resized.disconnect();
    themed.disconnect();
  };
}

/**
 * The pointer on a canvas: `moved(place)` with {x, y}, or null when it has left; `chose(left, right)` when a stretch
 * was marked, in pixels. The brush shows it meanwhile, `height()` pixels high.
 */
export function pointing(on, canvas, brush, { moved, chose, height }) {
  let place = null;
  let pressed = null;
  const edges = () => [Math.min(pressed, place.x), Math.max(pressed, place.x)];
  const show = () => {
    brush.hidden = pressed === null || !place || Math.abs(place.x - pressed) < 4;
    if (brush.hidden) return;
    const [left, right] = edges();
    brush.style.left = `${canvas.offsetLeft + left}px`;
    brush.style.width = `${right - left}px`;
    brush.style.top = `${canvas.offsetTop}px`;
    brush.style.height = `${height()}px`;
  };
  const move = (event) => {
    place = event && { x: event.offsetX, y: event.offsetY };
    show();
    moved(place);
  };
  on(canvas, "pointermove", move);
  on(canvas, "pointerleave", () => move(null));
  on(canvas, "pointerdown", (event) => {
    if (event.button !== 0) return;
    pressed = event.offsetX;
    canvas.setPointerCapture(event.pointerId);
  });
  on(canvas, "pointerup", (event) => {
    place = { x: event.offsetX, y: event.offsetY };
    if (pressed !== null && Math.abs(place.x - pressed) >= 4) chose(...edges());
    pressed = null;
    show();
  });
  on(canvas, "pointercancel", () => {
    pressed = null;
    show();
  });
}
