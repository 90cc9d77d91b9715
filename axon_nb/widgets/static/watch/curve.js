// @ts-check
// One curve of a job, over all ranks, with its value and its chart.

import { Chart, extentOf, makeChartHead } from "../shared/chart.js";
import { element } from "../shared/dom.js";
import {
  decode,
  describeStep,
  describeValue,
  formatValue,
  isStepped,
  joined,
  moveCursor,
  nearest,
  smoothed,
  valueSpan,
  xTicks,
  yTicks,
} from "./points.js";

/** @import { Axis, Kind } from "./points.js" */

/**
 * A curve, as the kernel sends it.
 *
 * @typedef {object} Curve
 * @property {string} name
 * @property {string} value the last one
 * @property {string} spread from the lowest to the highest rank; empty: they agree
 * @property {string} text the same as a sentence
 * @property {string} token of its colour
 * @property {Kind} kind
 * @property {Axis} axis
 * @property {DataView} [points]
 * @property {DataView[]} [earlier] the same of earlier cells
 * @property {string} [mark] names the cell of the curve
 */

/** @typedef {{logarithmic: boolean, weight: number}} Look weight: of smoothing, 0 to 1 */

const HEIGHT = 128; // pixels
const TICK_WIDTH = 80;
const MIN_SMOOTHED = 10; // points

/** A curve on a page; `update` redraws it without moving the cursor. */
export class CurveChart {
  #points = decode();
  /** @type {ReturnType<typeof decode>[]} */
  #earlier = [];
  /** @type {Look} */
  #look = { logarithmic: false, weight: 0 };
  #cursor = -1; // index of a point

  /**
   * @param {Curve} curve
   * @param {(curve: CurveChart, step: number | null, event?: PointerEvent) => void} onCursor called if the cursor moves
   * @param {(text: string) => void} announce reads a text out
   */
  constructor(curve, onCursor, announce) {
    this.curve = curve;
    this.onCursor = onCursor;
    this.announce = announce;
    this.head = makeChartHead();
    this.chart = new Chart(HEIGHT);
    const { svg } = this.chart;
    this.root = element("div", { class: "axon-watch-chart" }, this.head.root, svg);
    svg.addEventListener("keydown", (event) => this.#onKey(event));
    svg.addEventListener("pointermove", (event) => this.onCursor(this, this.chart.stepAt(event.clientX), event));
    svg.addEventListener("pointerleave", () => this.onCursor(this, null));
  }

  /**
   * @param {Curve} curve
   * @param {Look} look
   */
  update(curve, look) {
    this.curve = curve;
    this.#look = look;
    this.#points = decode(curve.points);
    this.#earlier = (curve.earlier ?? []).map(decode);
    this.draw();
  }

  draw() {
    const { curve } = this;
    const points = this.#points;
    const { logarithmic, weight } = this.#look;
    const isLogged = curve.axis === "steps";
    const stepped = isStepped(points);
    const isSmooth = isLogged && !stepped && weight > 0 && points.steps.length >= MIN_SMOOTHED;
    const all = joined([points, ...this.#earlier]);
    const span = valueSpan(all, curve.kind, { logarithmic: isLogged && logarithmic });
    const highest = Math.max(...all.highs);
    const { first, last } = extentOf([points, ...this.#earlier]);
    this.head.show(curve);
    this.chart.draw({
      points,
      earlier: this.#earlier,
      mark: curve.mark ?? "",
      ...(isSmooth ? { smooth: smoothed(points.means, weight) } : {}),
      isStepped: stepped,
      span,
      yTicks: yTicks(span, curve.kind),
      xTicks: xTicks([first, last], curve.axis, Math.max(2, Math.floor(this.chart.width / TICK_WIDTH))),
      above: highest > span.high * (1 + 1e-6) ? formatValue(highest, curve.kind) : "",
      token: curve.token,
    });
    const { svg } = this.chart;
    const extent = `${curve.axis} ${formatValue(first, "number")} to ${formatValue(last, "number")}`;
    svg.setAttribute("aria-label", `${curve.name}: ${curve.text}; ${extent}`);
    Object.assign(svg.dataset, {
      points: points.steps.length,
      earlier: this.#earlier.length,
      low: span.low,
      high: span.high,
    });
  }

  /**
   * Move the cursor to the point nearest to a step; null: nowhere. Returns the text for that point; empty: none.
   *
   * @param {number | null} step
   */
  showAt(step) {
    this.#cursor = step === null ? -1 : nearest(this.#points, step);
    this.chart.moveTo(this.#cursor);
    return this.#cursor < 0 ? "" : describeValue(this.#points, this.#cursor, this.curve.kind);
  }

  /** @param {KeyboardEvent} event */
  #onKey(event) {
    const hasModifier = event.ctrlKey || event.metaKey || event.altKey;
    const next = hasModifier ? null : moveCursor(this.#cursor, this.#points.steps.length, event.key);
    if (next === null) return;
    event.preventDefault();
    event.stopPropagation();
    const step = next < 0 ? null : this.#points.steps[next];
    this.onCursor(this, step);
    if (step === null) return;
    const where = describeStep(step, this.curve.axis);
    this.announce(`${this.curve.name}, ${where}: ${describeValue(this.#points, next, this.curve.kind)}`);
  }
}
