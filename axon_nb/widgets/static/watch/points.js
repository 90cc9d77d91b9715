// @ts-check
// The points of a curve: their scales, paths and text.

import { formatBytes } from "../shared/format.js";

/** @typedef {{steps: number[], lows: number[], means: number[], highs: number[]}} Points over all ranks, by step */

/** @typedef {{low: number, high: number, logarithmic: boolean}} Span of the vertical axis */

/** @typedef {{left: number, top: number, width: number, height: number}} Frame */

/** @typedef {"number" | "bytes" | "share"} Kind of a value */

/** @typedef {"steps" | "seconds"} Axis what the horizontal axis counts */

/**
 * The points of a curve from bytes: float32 of all steps, then of all lows, means and highs.
 *
 * @param {DataView} [bytes]
 * @returns {Points}
 */
export function decode(bytes) {
  const view = bytes ?? new DataView(new ArrayBuffer(0));
  const count = Math.floor(view.byteLength / 16);
  const column = (/** @type {number} */ number) =>
    Array.from({ length: count }, (_, i) => view.getFloat32(4 * (number * count + i), true));
  return { steps: column(0), lows: column(1), means: column(2), highs: column(3) };
}

/**
 * What the vertical axis spans; logarithmic only if all values are above zero.
 *
 * @param {Points} points
 * @param {boolean} logarithmic
 * @returns {Span}
 */
export function valueSpan(points, logarithmic) {
  const low = Math.min(...points.lows);
  const high = Math.max(...points.highs);
  if (!points.steps.length) return { low: 0, high: 1, logarithmic: false };
  if (logarithmic && low > 0) {
    return low === high ? { low: low / 2, high: high * 2, logarithmic: true } : { low, high, logarithmic: true };
  }
  const margin = low === high ? Math.abs(low) * 0.1 || 1 : 0;
  return { low: low - margin, high: high + margin, logarithmic: false };
}

/**
 * The position of a value in a span: 0 at the bottom, 1 at the top.
 *
 * @param {number} value
 * @param {Span} span
 */
export function positionOf(value, { low, high, logarithmic }) {
  if (logarithmic) return (Math.log(value) - Math.log(low)) / (Math.log(high) - Math.log(low));
  return (value - low) / (high - low);
}

/**
 * SVG paths in a frame: the line of means, and the band from lows to highs.
 *
 * @param {Points} points
 * @param {Span} span
 * @param {Frame} frame
 */
export function paths(points, span, { left, top, width, height }) {
  const { steps } = points;
  if (!steps.length) return { line: "", band: "" };
  const first = steps[0];
  const numSteps = steps[steps.length - 1] - first || 1;
  const x = (/** @type {number} */ i) => (left + (width * (steps[i] - first)) / numSteps).toFixed(1);
  const y = (/** @type {number} */ value) => (top + height * (1 - positionOf(value, span))).toFixed(1);
  const at = (/** @type {number[]} */ values) => values.map((value, i) => `${x(i)} ${y(value)}`);
  const band = [...at(points.highs), ...at(points.lows).reverse()];
  return { line: `M${at(points.means).join("L")}`, band: `M${band.join("L")}z` };
}

/**
 * The point nearest to a share of the width, from 0 to 1; -1: none.
 *
 * @param {Pick<Points, "steps">} points
 * @param {number} share
 */
export function nearest({ steps }, share) {
  if (!steps.length) return -1;
  const target = steps[0] + share * (steps[steps.length - 1] - steps[0]);
  let best = 0;
  steps.forEach((step, i) => {
    if (Math.abs(step - target) < Math.abs(steps[best] - target)) best = i;
  });
  return best;
}

/**
 * Format a number: as bytes, as a share, or with at most four digits.
 *
 * @param {number} value
 * @param {Kind} kind
 */
export function formatValue(value, kind) {
  if (kind === "share") return `${Math.round(100 * value)} %`;
  if (kind === "bytes") return formatBytes(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value);
  const magnitude = Math.abs(value);
  return magnitude >= 1e-4 && magnitude < 1e6 ? String(Number(value.toPrecision(4))) : value.toExponential(3);
}

/**
 * Describe one point.
 *
 * @param {Points} points
 * @param {number} i
 * @param {{kind: Kind, axis: Axis}} curve
 */
export function describe(points, i, { kind, axis }) {
  const where = axis === "seconds" ? `after ${formatValue(points.steps[i], "number")} s` : `step ${points.steps[i]}`;
  const [low, mean, high] = [points.lows, points.means, points.highs].map((column) => formatValue(column[i], kind));
  return `${where}: ${mean}${low === high ? "" : ` (${low} to ${high} over ranks)`}`;
}

/**
 * Which point a key moves the cursor to; null if the key has no meaning.
 *
 * @param {number} i -1: the cursor is nowhere
 * @param {number} count
 * @param {string} key
 */
export function moveCursor(i, count, key) {
  if (!count) return null;
  const from = i < 0 ? count : i;
  /** @type {Record<string, number>} */
  const targets = { ArrowLeft: from - 1, ArrowRight: i < 0 ? 0 : i + 1, Home: 0, End: count - 1 };
  if (key === "Escape") return -1;
  return key in targets ? Math.max(0, Math.min(count - 1, targets[key])) : null;
}
