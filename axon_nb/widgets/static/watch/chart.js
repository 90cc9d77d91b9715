// @ts-check
// One curve of a job, over all ranks.

import { element, svgElement } from "../shared/dom.js";
import { decode, describe, formatValue, moveCursor, nearest, paths, positionOf, valueSpan } from "./points.js";

/** @import { Axis, Kind } from "./points.js" */

/**
 * A curve, as the kernel sends it.
 *
 * @typedef {object} Curve
 * @property {string} name
 * @property {string} text of the last point
 * @property {Kind} kind
 * @property {Axis} axis
 * @property {DataView} [points]
 */

const FRAME = { left: 0, top: 4, width: 300, height: 74 };

function buildElements() {
  const title = element("b");
  const last = element("span");
  const viewBox = `0 0 ${FRAME.width} ${FRAME.height + 2 * FRAME.top}`;
  const band = svgElement("path", { class: "axon-watch-band" });
  const line = svgElement("path", { class: "axon-watch-mean", "vector-effect": "non-scaling-stroke" });
  const dot = svgElement("circle", { r: 2.5, class: "axon-watch-dot" });
  const cursor = svgElement("path", { class: "axon-watch-cursor", "vector-effect": "non-scaling-stroke" });
  const edges = [FRAME.top, FRAME.top + FRAME.height].map((y) =>
    svgElement("path", { d: `M0 ${y}h${FRAME.width}`, class: "axon-watch-grid" }),
  );
  const attributes = { viewBox, preserveAspectRatio: "none", role: "img", tabindex: "0" };
  const svg = svgElement("svg", attributes, ...edges, band, line, dot, cursor);
  const axis = element("div", { class: "axon-view-muted axon-watch-axis" });
  const root = element("div", { class: "axon-watch-chart" }, element("div", {}, title, " ", last), svg, axis);
  return { root, title, last, svg, band, line, dot, cursor, axis };
}

/** A curve on a page; `update` draws it again, and the cursor stays where it is. */
export class Chart {
  #points = decode();
  #logarithmic = false;
  #cursor = -1; // index of a point

  /**
   * @param {Curve} curve
   * @param {(text: string) => void} announce reads a text out
   */
  constructor(curve, announce) {
    this.curve = curve;
    this.announce = announce;
    this.page = buildElements();
    this.root = this.page.root;
    const { svg } = this.page;
    svg.addEventListener("keydown", (event) => this.#onKey(event));
    svg.addEventListener("pointermove", (event) => {
      const frame = svg.getBoundingClientRect();
      const share = (event.clientX - frame.left) / (frame.width || 1);
      this.#cursor = nearest(this.#points, Math.max(0, Math.min(1, share)));
      this.#draw();
    });
    svg.addEventListener("pointerleave", () => {
      this.#cursor = -1;
      this.#draw();
    });
  }

  /**
   * @param {Curve} curve
   * @param {boolean} logarithmic
   */
  update(curve, logarithmic) {
    this.curve = curve;
    this.#points = decode(curve.points);
    this.#logarithmic = logarithmic;
    this.#draw();
  }

  /** @param {KeyboardEvent} event */
  #onKey(event) {
    const hasModifier = event.ctrlKey || event.metaKey || event.altKey;
    const next = hasModifier ? null : moveCursor(this.#cursor, this.#points.steps.length, event.key);
    if (next === null) return;
    event.preventDefault();
    event.stopPropagation();
    this.#cursor = next;
    this.#draw();
    if (next >= 0) this.announce(`${this.curve.name}, ${describe(this.#points, next, this.curve)}`);
  }

  #draw() {
    const { curve, page } = this;
    const points = this.#points;
    const span = valueSpan(points, this.#logarithmic);
    const { line, band } = paths(points, span, FRAME);
    const last = points.steps.length - 1;
    page.band.setAttribute("d", band);
    page.line.setAttribute("d", last > 0 ? line : "");
    page.dot.setAttribute("visibility", last === 0 ? "visible" : "hidden");
    if (last === 0) {
      page.dot.setAttribute("cx", "3");
      page.dot.setAttribute("cy", String(FRAME.top + FRAME.height * (1 - positionOf(points.means[0], span))));
    }
    this.#cursor = Math.min(this.#cursor, last);
    this.#drawCursor();
    const extent = this.#axisText();
    const scale = `${formatValue(span.low, curve.kind)} to ${formatValue(span.high, curve.kind)}`;
    const axes = `↔ ${extent} · ↕ ${scale}${span.logarithmic ? ", logarithmic" : ""}`;
    page.axis.textContent = this.#cursor < 0 ? axes : describe(points, this.#cursor, curve);
    page.svg.setAttribute("aria-label", `${curve.name}: ${curve.text}; ${extent}`);
    page.svg.dataset.points = String(last + 1);
    page.title.textContent = curve.name;
    page.last.textContent = page.root.title = curve.text;
  }

  #drawCursor() {
    const { steps } = this.#points;
    const at = this.#cursor;
    const numSteps = steps[steps.length - 1] - steps[0] || 1;
    const x = at < 0 ? 0 : (FRAME.width * (steps[at] - steps[0])) / numSteps;
    this.page.cursor.setAttribute("d", at < 0 ? "" : `M${x} ${FRAME.top}v${FRAME.height}`);
  }

  /** What the horizontal axis spans, such as `steps 0 to 12`. */
  #axisText() {
    const { steps } = this.#points;
    const [prefix, suffix] = this.curve.axis === "seconds" ? ["", " s"] : ["steps ", ""];
    if (!steps.length) return prefix;
    const [first, last] = [steps[0], steps[steps.length - 1]].map((step) => formatValue(step, "number"));
    return `${prefix}${first} to ${last}${suffix}`;
  }
}
