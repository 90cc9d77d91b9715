// @ts-check
// The points of a curve: their scales, ticks and text.

import { formatBytes } from "../shared/format.js";
import { roundBytes, roundSpan, roundStep, valueTicks } from "../shared/scale.js";

/** @import { Points } from "../shared/chart.js" */
/** @import { Span } from "../shared/scale.js" */

/** @typedef {"number" | "rate" | "bytes" | "share"} Kind of a value; all but numbers begin at zero */

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
 * The points of several curves, as one.
 *
 * @param {Points[]} curves
 * @returns {Points}
 */
export function joined(curves) {
  const column = (/** @type {keyof Points} */ name) => curves.flatMap((points) => points[name]);
  return { steps: column("steps"), lows: column("lows"), means: column("means"), highs: column("highs") };
}

const TICKS = 4;
const ZERO_SHARE = 0.4; // the axis begins at zero if the lowest value is below this share of the highest
const MIN_RELATIVE = 0.02; // at least this share of the highest value, so that noise does not fill the axis
const USUAL = 0.955; // of the points are within the axis if the others are far off
const FAR = 2.5; // times the span of the usual ones

/**
 * What the vertical axis spans, from tick to tick; logarithmic only if all values are above zero.
 *
 * @param {Points} points
 * @param {Kind} kind
 * @param {{logarithmic?: boolean, all?: boolean}} options all: outliers stay within the axis
 * @returns {Span}
 */
export function valueSpan(points, kind, { logarithmic = false, all = false } = {}) {
  if (!points.steps.length) return { low: 0, high: 1, logarithmic: false };
  let low = Math.min(...points.lows);
  let high = Math.max(...points.highs);
  if (kind === "share")
    return { low: 0, high: high > 0.5 ? 1 : roundSpan(0, high || 1, TICKS).high, logarithmic: false };
  if (kind === "bytes") return roundSpan(0, high, TICKS, roundBytes);
  if (logarithmic && low > 0) {
    return low === high ? { low: low / 2, high: high * 2, logarithmic: true } : { low, high, logarithmic: true };
  }
  if (kind === "rate") return roundSpan(0, high, TICKS);
  if (!all) [low, high] = usualSpan(points, low, high);
  if (low >= 0 && low < ZERO_SHARE * high) low = 0;
  const lacking = MIN_RELATIVE * Math.max(Math.abs(low), Math.abs(high)) - (high - low);
  if (lacking > 0 && high > low) [low, high] = [low - lacking / 2, high + lacking / 2];
  return roundSpan(low, high, TICKS);
}

/**
 * The span without outliers, if these are far off.
 *
 * @param {Points} points
 * @param {number} low
 * @param {number} high
 */
function usualSpan({ lows, highs }, low, high) {
  if (highs.length < 20) return [low, high];
  const rank = (/** @type {number[]} */ values, /** @type {number} */ share) =>
    [...values].sort((a, b) => a - b)[Math.round(share * (values.length - 1))];
  const [usualLow, usualHigh] = [rank(lows, 1 - USUAL), rank(highs, USUAL)];
  const length = usualHigh - usualLow;
  if (length <= 0) return [low, high];
  return [usualLow - low > FAR * length ? usualLow : low, high - usualHigh > FAR * length ? usualHigh : high];
}

/**
 * Ticks of the vertical axis with their labels.
 *
 * @param {Span} span
 * @param {Kind} kind
 */
export function yTicks(span, kind) {
  const step = kind === "bytes" ? roundBytes : roundStep;
  return valueTicks(span, TICKS, step).map((at) => ({ at, label: formatTick(at, kind) }));
}

/**
 * @param {number} value
 * @param {Kind} kind
 */
function formatTick(value, kind) {
  if (kind === "share") return `${Number((100 * value).toPrecision(3))}%`;
  if (kind === "bytes")
    return value
      ? formatBytes(value)
          .replace(/\.0+ /, " ")
          .replace(/(\.\d*[1-9])0+ /, "$1 ")
      : "0";
  return formatValue(value, kind);
}

/**
 * Ticks of the horizontal axis with their labels.
 *
 * @param {number[]} steps
 * @param {Axis} axis
 * @param {number} count
 */
export function xTicks(steps, axis, count) {
  const [first, last] = [steps[0] ?? 0, steps[steps.length - 1] ?? 1];
  const span = { low: first, high: last, logarithmic: false };
  if (first === last)
    return [{ at: first, label: axis === "seconds" ? formatTime(first) : formatValue(first, "number") }];
  const round = (/** @type {number} */ length, /** @type {number} */ most) =>
    axis === "seconds" ? roundSeconds(length / most) : Math.max(1, roundStep(length, most));
  const label = (/** @type {number} */ at) => (axis === "seconds" ? formatTime(at) : formatValue(at, "number"));
  const word = axis === "seconds" ? "time " : "step ";
  return valueTicks(span, count, round).map((at, i) => ({ at, label: `${i ? "" : word}${label(at)}` }));
}

/** @param {number} rough seconds */
function roundSeconds(rough) {
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200, 86400];
  return steps.find((step) => step >= rough) ?? 86400 * Math.ceil(rough / 86400);
}

/** @param {number} seconds */
function formatTime(seconds) {
  const whole = Math.round(seconds);
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  const rest = String(whole % 60).padStart(2, "0");
  return hours ? `${hours}:${String(minutes).padStart(2, "0")}:${rest}` : `${minutes}:${rest}`;
}

/**
 * Whether a value holds for several steps and then changes: a learning rate that a schedule sets once per epoch.
 *
 * @param {Points} points
 */
export function isStepped({ means }) {
  let changes = 0;
  for (let i = 1; i < means.length; i++) if (means[i] !== means[i - 1]) changes++;
  return means.length > 3 && changes > 0 && changes <= means.length / 3;
}

/**
 * The exponential moving average of values; early ones are not drawn to zero.
 *
 * @param {number[]} values
 * @param {number} weight of what was before, 0 to 1
 */
export function smoothed(values, weight) {
  let average = 0;
  let total = 0;
  return values.map((value) => {
    average = weight * average + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return average / total;
  });
}

/**
 * The point nearest to a step; -1: none.
 *
 * @param {Pick<Points, "steps">} points
 * @param {number} target
 */
export function nearest({ steps }, target) {
  let best = steps.length ? 0 : -1;
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
  const exponential = value.toExponential(3).replace(/\.?0+e/, "e");
  return magnitude >= 1e-4 && magnitude < 1e6 ? String(Number(value.toPrecision(4))) : exponential;
}

/**
 * What a point says: its mean, and its range over ranks if they differ.
 *
 * @param {Points} points
 * @param {number} i
 * @param {Kind} kind
 */
export function describeValue(points, i, kind) {
  const [low, mean, high] = [points.lows, points.means, points.highs].map((column) => formatValue(column[i], kind));
  return `${mean}${low === high ? "" : ` (${low} to ${high} over ranks)`}`;
}

/**
 * Where a point is.
 *
 * @param {number} step
 * @param {Axis} axis
 */
export function describeStep(step, axis) {
  return axis === "seconds" ? `after ${formatValue(step, "number")} s` : `step ${formatValue(step, "number")}`;
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
