// @ts-check
// A curve with axes, in SVG: lowest, mean and highest value by step. Laid out in pixels, so text is never stretched.

import { element, setText, svgElement } from "./dom.js";
import { positionOf } from "./scale.js";

/** @import { Span } from "./scale.js" */

/** @typedef {{steps: number[], lows: number[], means: number[], highs: number[]}} Points over all ranks, by step */

/** @typedef {{left: number, right: number, top: number, bottom: number}} Frame in pixels */

/** @typedef {{first: number, last: number}} Extent of the horizontal axis */

/**
 * What is drawn at once.
 *
 * @typedef {object} Curves
 * @property {Points} points
 * @property {Points[]} earlier curves of earlier cells, drawn pale
 * @property {string} mark names the cell of `points`; empty: nothing marks its start
 * @property {number[]} [smooth] drawn instead of the means, which become pale
 * @property {boolean} isStepped whether each value holds until the next one
 * @property {Span} span of the vertical axis
 * @property {{at: number, label: string}[]} yTicks
 * @property {{at: number, label: string}[]} xTicks
 * @property {string} above what is higher than the span, as text; empty: nothing
 * @property {string} token name of the colour
 */

const MARGIN = { top: 8, right: 8, bottom: 20, gap: 7 };
const LETTER = 6.4; // pixels
const MIN_LEFT = 26;

/**
 * The frame of a chart whose tick labels have at most this many letters.
 *
 * @param {number} width
 * @param {number} height
 * @param {number} letters
 * @returns {Frame}
 */
export function frameOf(width, height, letters) {
  const left = Math.max(MIN_LEFT, MARGIN.gap + 4 + LETTER * letters);
  return { left, right: Math.max(left + 20, width - MARGIN.right), top: MARGIN.top, bottom: height - MARGIN.bottom };
}

/**
 * What the horizontal axis of curves spans.
 *
 * @param {Points[]} curves
 * @returns {Extent}
 */
export function extentOf(curves) {
  const ends = curves.flatMap(({ steps }) => [steps[0], steps[steps.length - 1]]).filter((end) => end !== undefined);
  return ends.length ? { first: Math.min(...ends), last: Math.max(...ends) } : { first: 0, last: 1 };
}

/**
 * SVG paths in a frame: the line of means, and the band from lows to highs.
 *
 * @param {Points} points
 * @param {number[]} values of the line
 * @param {Span} span
 * @param {Frame} frame
 * @param {boolean} isStepped
 * @param {Extent} extent
 */
export function paths(points, values, span, frame, isStepped, extent = extentOf([points])) {
  if (!points.steps.length) return { line: "", band: "" };
  const x = xScale(extent, frame);
  const y = (/** @type {number} */ value) =>
    (frame.bottom - (frame.bottom - frame.top) * positionOf(value, span)).toFixed(1);
  const at = points.steps.map((step) => x(step).toFixed(1));
  /** @type {(own: number[], order: number[]) => string} */
  const along = (own, order) =>
    order.map((i, k) => (k && isStepped ? `H${at[i]}V${y(own[i])}` : `${k ? "L" : ""}${at[i]} ${y(own[i])}`)).join("");
  const order = [...at.keys()];
  const back = isStepped ? "" : `L${along(points.lows, [...order].reverse())}`;
  return { line: `M${along(values, order)}`, band: back && `M${along(points.highs, order)}${back}z` };
}

/**
 * From steps to pixels.
 *
 * @param {Extent} extent
 * @param {Frame} frame
 */
export function xScale({ first, last }, { left, right }) {
  const length = last - first || 1;
  return (/** @type {number} */ step) => left + ((right - left) * (step - first)) / length;
}

/** The chart of one curve. */
export class Chart {
  /** @type {Curves | null} */
  #curves = null;
  /** @type {Frame} */
  #frame = { left: 0, right: 1, top: 0, bottom: 1 };
  /** @type {Extent} */
  #extent = { first: 0, last: 1 };
  #cursor = -1;
  width = 0; // in pixels, as last measured

  /** @param {number} height in pixels */
  constructor(height) {
    this.height = height;
    this.grid = svgElement("g");
    this.words = svgElement("g", { "aria-hidden": "true" });
    this.band = svgElement("path", { class: "axon-view-chart-band" });
    this.raw = svgElement("path", { class: "axon-view-chart-raw" });
    this.pale = svgElement("path", { class: "axon-view-chart-earlier" });
    this.start = svgElement("path", { class: "axon-view-chart-start" });
    this.line = svgElement("path", { class: "axon-view-chart-line" });
    this.dot = svgElement("circle", { class: "axon-view-chart-dot", r: 3 });
    this.cursorLine = svgElement("path", { class: "axon-view-chart-cursor" });
    this.cursorDot = svgElement("circle", { class: "axon-view-chart-dot", r: 3.5, visibility: "hidden" });
    const curves = [this.pale, this.start, this.band, this.raw, this.line, this.dot, this.cursorLine, this.cursorDot];
    const attributes = { class: "axon-view-chart", role: "img", tabindex: 0, height };
    this.svg = svgElement("svg", attributes, this.grid, ...curves, this.words);
  }

  /** Read the width: of all charts before any is drawn, as each reading between two drawings is a layout of the page. */
  measure() {
    this.width = this.svg.clientWidth;
  }

  /** @param {Curves} curves */
  draw(curves) {
    this.#curves = curves;
    const { width } = this;
    if (!width) return;
    const { points, smooth, span, isStepped, yTicks, xTicks, earlier } = curves;
    this.#extent = extentOf([points, ...earlier]);
    this.#frame = frameOf(width, this.height, Math.max(...yTicks.map(({ label }) => label.length), 0));
    this.svg.style.setProperty("--paint", `var(--axon-${curves.token})`);
    const clipped = clip(points, span);
    const isLine = points.steps.length > 1;
    const main = paths(
      clipped,
      clip({ ...points, means: smooth ?? points.means }, span).means,
      span,
      this.#frame,
      isStepped,
      this.#extent,
    );
    const pale = earlier.map((line) => this.#line(clip(line, span), isStepped));
    this.pale.setAttribute("d", pale.join(""));
    this.band.setAttribute("d", isLine ? main.band : "");
    this.line.setAttribute("d", isLine ? main.line : "");
    this.raw.setAttribute("d", smooth && isLine ? this.#line(clipped, isStepped) : "");
    this.#place(this.dot, points.steps.length - 1);
    this.#drawAxes(yTicks, xTicks);
    this.moveTo(this.#cursor);
  }

  /**
   * @param {Points} points
   * @param {boolean} isStepped
   */
  #line(points, isStepped) {
    const { span } = /** @type {Curves} */ (this.#curves);
    return paths(points, points.means, span, this.#frame, isStepped, this.#extent).line;
  }

  /**
   * Put the cursor on a point; -1: nowhere.
   *
   * @param {number} index
   */
  moveTo(index) {
    this.#cursor = index;
    const { top, bottom } = this.#frame;
    const steps = this.#curves?.points.steps ?? [];
    const isShown = index >= 0 && index < steps.length;
    this.cursorLine.setAttribute(
      "d",
      isShown ? `M${xScale(this.#extent, this.#frame)(steps[index])} ${top}V${bottom}` : "",
    );
    this.#place(this.cursorDot, isShown ? index : -1);
  }

  /**
   * The step at a place of the page; null: there is none.
   *
   * @param {number} clientX
   */
  stepAt(clientX) {
    const steps = this.#curves?.points.steps ?? [];
    if (!steps.length) return null;
    const { left, right } = this.#frame;
    const share = (clientX - this.svg.getBoundingClientRect().left - left) / (right - left);
    const { first, last } = this.#extent;
    return first + Math.max(0, Math.min(1, share)) * (last - first);
  }

  /**
   * @param {SVGCircleElement} dot
   * @param {number} index
   */
  #place(dot, index) {
    const { points, smooth, span } = /** @type {Curves} */ (this.#curves ?? {});
    dot.setAttribute("visibility", points && index >= 0 ? "visible" : "hidden");
    if (!points || index < 0) return;
    const { top, bottom } = this.#frame;
    const value = Math.max(span.low, Math.min(span.high, (smooth ?? points.means)[index]));
    dot.setAttribute("cx", xScale(this.#extent, this.#frame)(points.steps[index]).toFixed(1));
    dot.setAttribute("cy", (bottom - (bottom - top) * positionOf(value, span)).toFixed(1));
  }

  /**
   * @param {{at: number, label: string}[]} yTicks
   * @param {{at: number, label: string}[]} xTicks
   */
  #drawAxes(yTicks, xTicks) {
    const { left, right, top, bottom } = this.#frame;
    const { points, span, above, mark } = /** @type {Curves} */ (this.#curves);
    const y = (/** @type {number} */ value) => Math.round(bottom - (bottom - top) * positionOf(value, span)) + 0.5;
    const x = xScale(this.#extent, this.#frame);
    const rules = yTicks.map(({ at }) =>
      svgElement("path", { class: "axon-view-chart-grid", d: `M${left} ${y(at)}H${right}` }),
    );
    rules.push(svgElement("path", { class: "axon-view-chart-base", d: `M${left} ${bottom + 0.5}H${right}` }));
    this.grid.replaceChildren(...rules);
    const words = yTicks.map(({ at, label }) => makeText(label, left - MARGIN.gap, y(at) + 3.5, "end"));
    for (const { at, label } of xTicks) {
      const half = (LETTER * label.length) / 2;
      const middle = Math.max(left + half - 4, Math.min(right - half + 4, x(at)));
      words.push(makeText(label, middle, this.height - 4, "middle"));
    }
    const begin = points.steps[0];
    const isMarked = mark !== "" && begin !== undefined;
    this.start.setAttribute("d", isMarked ? `M${x(begin).toFixed(1)} ${top}V${bottom}` : "");
    if (isMarked) words.push(makeMark(mark, x(begin), this.#frame));
    if (above) words.push(makeText(`↑ ${above}`, right, top + 9, "end"));
    this.words.replaceChildren(...words);
  }
}

/**
 * Points within a span.
 *
 * @param {Points} points
 * @param {Span} span
 * @returns {Points}
 */
function clip(points, { low, high }) {
  const within = (/** @type {number[]} */ values) => values.map((value) => Math.max(low, Math.min(high, value)));
  return { steps: points.steps, lows: within(points.lows), means: within(points.means), highs: within(points.highs) };
}

/**
 * @param {string} text
 * @param {number} x
 * @param {number} y
 * @param {string} anchor
 */
function makeText(text, x, y, anchor) {
  return svgElement("text", { x: x.toFixed(1), y: y.toFixed(1), "text-anchor": anchor }, text);
}

/**
 * The name of a run where it starts; to the left of that if there is no space to its right.
 *
 * @param {string} name
 * @param {number} at
 * @param {Frame} frame
 */
function makeMark(name, at, { right, top }) {
  const fits = at + LETTER * name.length < right;
  return makeText(name, fits ? at + 3 : at - 3, top + 9, fits ? "start" : "end");
}

/** The words above a chart: its name, the last value, and how far the ranks are apart. */
export function makeChartHead() {
  const name = element("div", { class: "axon-view-chart-name" });
  const value = element("span", { class: "axon-view-chart-value" });
  const spread = element("span", { class: "axon-view-chart-spread" });
  const root = element("div", { class: "axon-view-chart-head" }, name, value, spread);
  /** @param {{name: string, value: string, spread: string}} texts */
  const show = (texts) => {
    setText(name, texts.name);
    setText(value, texts.value);
    setText(spread, texts.spread);
  };
  return { root, show };
}
