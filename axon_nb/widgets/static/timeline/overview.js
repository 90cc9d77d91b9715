// @ts-check
// The overview of a timeline: how many ranks compute and wait over all of the time, and the range that is shown.

import { getContext, resizeCanvas } from "../shared/canvas.js";
import { formatDuration } from "../shared/format.js";
import { ticks, timeAt } from "../shared/time_axis.js";
import { pixelShares } from "./layout.js";
import { foldRows } from "./rows.js";

/** @import { Listen } from "../shared/dom.js" */
/** @import { Theme } from "../shared/theme.js" */
/** @import { TimeRange } from "../shared/time_axis.js" */
/** @import { Derived } from "./derived.js" */
/** @import { SpanSelection } from "./filter.js" */
/** @import { Store } from "./store.js" */

const HEIGHT = 30; // pixels of the page
const AXIS = { height: 38, step: 10, label: 27 };
const REFRESH_MS = 500;
const MIN_STEP = { named: 34, timed: 84 }; // pixels of the page of a step that is named, and of one with its length

/**
 * The share of ranks that work, and that wait, in each of `width` columns.
 *
 * @param {Store} store
 * @param {SpanSelection & TimeRange & {width: number, derived: Derived}} options
 */
export function columnShares(store, options) {
  const { paints, ranks } = options.config;
  const rows = foldRows(ranks, new Set(), []);
  const { pixels } = pixelShares(store, { ...options, rows });
  const { share, width, kinds } = pixels;
  const waiting = paints.findIndex((paint) => paint.kind === "wait");
  const works = new Float32Array(width);
  const waits = new Float32Array(width);
  rows.list.forEach((folded, row) => {
    const part = folded.ranks.length / ranks.length;
    for (let x = 0; x < width; x++) {
      const at = (2 * row * width + x) * kinds;
      let busy = 0;
      for (let kind = 0; kind < kinds; kind++) if (kind !== waiting) busy += share[at + kind];
      works[x] += Math.min(1, busy) * part;
      waits[x] += Math.min(1, share[at + waiting]) * part;
    }
  });
  return { works, waits };
}

/** The overview on its canvas. */
export class Overview {
  #shares = { works: new Float32Array(0), waits: new Float32Array(0) };
  #drawnFor = "";
  #drawnAt = -REFRESH_MS;

  /**
   * @param {HTMLCanvasElement} canvas
   * @param {Store} store
   * @param {Derived} derived
   */
  constructor(canvas, store, derived) {
    this.canvas = canvas;
    this.store = store;
    this.derived = derived;
    /** @type {TimeRange} */
    this.whole = { from: 0, to: 1 };
  }

  /**
   * @param {number} width pixels of the page
   * @param {{whole: TimeRange, range: TimeRange, selection: SpanSelection, theme: Theme}} frame
   */
  draw(width, { whole, range, selection, theme }) {
    const ratio = resizeCanvas(this.canvas, width, HEIGHT);
    this.whole = whole;
    const columns = Math.round(width);
    const key = `${this.store.updates} ${whole.from} ${whole.to} ${columns} ${selection.shown.join("")}`;
    // What is skipped is drawn when time moves on, and after the end it does not.
    const isDue = this.store.finished || performance.now() - this.#drawnAt >= REFRESH_MS;
    if (key !== this.#drawnFor && isDue) {
      [this.#drawnFor, this.#drawnAt] = [key, performance.now()];
      this.#shares = columnShares(this.store, { ...selection, ...whole, width: columns, derived: this.derived });
    }
    this.#paint(theme, ratio, range);
  }

  /**
   * Move the range with the pointer.
   *
   * @param {Listen} on
   * @param {() => TimeRange} range
   * @param {(range: TimeRange) => void} onMove
   */
  listen(on, range, onMove) {
    const { canvas } = this;
    let grabbed = Number.NaN; // seconds from the start of the range
    /** @param {PointerEvent} event */
    const move = (event) => {
      if (Number.isNaN(grabbed)) return;
      const { from, to } = range();
      const start = timeAt(canvas, this.whole, event.offsetX) - grabbed;
      onMove({ from: start, to: start + to - from });
    };
    /** @param {PointerEvent} event */
    const grab = (event) => {
      const { from, to } = range();
      const time = timeAt(canvas, this.whole, event.offsetX);
      grabbed = time >= from && time <= to ? time - from : (to - from) / 2;
      canvas.setPointerCapture(event.pointerId);
      move(event);
    };
    const release = () => {
      grabbed = Number.NaN;
    };
    on(canvas, "pointerdown", grab);
    on(canvas, "pointermove", move);
    on(canvas, "pointerup", release);
    on(canvas, "pointercancel", release);
  }

  /**
   * @param {Theme} theme
   * @param {number} ratio
   * @param {TimeRange} range
   */
  #paint(theme, ratio, { from, to }) {
    const { canvas, whole } = this;
    const context = getContext(canvas);
    const { width, height } = canvas;
    context.fillStyle = theme.of("plane");
    context.fillRect(0, 0, width, height);
    const { works, waits } = this.#shares;
    const step = width / Math.max(1, works.length);
    works.forEach((share, x) => {
      context.fillStyle = theme.of("quiet");
      context.fillRect(x * step, height * (1 - share), step + 0.5, height * share);
      context.fillStyle = theme.of("kind-wait");
      context.fillRect(x * step, height * (1 - share - waits[x]), step + 0.5, height * waits[x]);
    });
    const scale = width / (whole.to - whole.from);
    const [left, right] = [Math.max(0, (from - whole.from) * scale), Math.min(width, (to - whole.from) * scale)];
    if (right - left >= width - 2 * ratio) return;
    context.globalAlpha = 0.65;
    context.fillStyle = theme.of("plane");
    context.fillRect(0, 0, left, height);
    context.fillRect(right, 0, width - right, height);
    context.globalAlpha = 1;
    context.strokeStyle = theme.of("accent");
    context.lineWidth = ratio;
    context.strokeRect(left + ratio / 2, ratio / 2, Math.max(ratio, right - left - ratio), height - ratio);
  }
}

/**
 * Draw the axis: the steps that optimizers end, and below them the time.
 *
 * @param {HTMLCanvasElement} canvas
 * @param {number} width pixels of the page
 * @param {{range: TimeRange, zero: number, until: number, steps: number[], theme: Theme}} frame until: end of the cell
 */
export function drawTimeAxis(canvas, width, { range: { from, to }, zero, until, steps, theme }) {
  const ratio = resizeCanvas(canvas, width, AXIS.height);
  const context = getContext(canvas);
  context.clearRect(0, 0, canvas.width, canvas.height);
  Object.assign(context, {
    font: `${11 * ratio}px ${theme.font}`,
    textBaseline: "middle",
    fillStyle: theme.of("muted"),
  });
  context.textAlign = "left";
  for (const { x, label } of ticks(from, to, width, { zero })) {
    const size = context.measureText(label).width;
    context.fillText(label, Math.min(Math.max(0, x * ratio - size / 2), canvas.width - size), AXIS.label * ratio);
  }
  const place = (/** @type {number} */ time) => ((time - from) / (to - from)) * width;
  const known = [zero, ...steps.filter((end) => end > zero && end <= until)];
  for (let i = 1; i < known.length; i++) {
    const [left, right] = [place(known[i - 1]), place(known[i])];
    if (right < 0 || left > width || right - left < MIN_STEP.named) continue;
    const time = right - left < MIN_STEP.timed ? "" : ` · ${formatDuration(known[i] - known[i - 1])}`;
    context.fillStyle = theme.of("edge");
    context.fillRect(Math.max(0, left) * ratio, 2 * ratio, ratio, 16 * ratio);
    context.fillStyle = theme.of("muted");
    const text = `step ${i - 1}${time}`;
    if (context.measureText(text).width < (right - Math.max(0, left) - 8) * ratio) {
      context.fillText(text, (Math.max(0, left) + 5) * ratio, AXIS.step * ratio);
    }
  }
}
