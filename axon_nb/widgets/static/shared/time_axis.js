// @ts-check
// The time axis of strip and timeline: ranges, ticks with labels, and the kinds in each of its pixels.

import { getContext } from "./canvas.js";
import { pad } from "./format.js";

/** @import { Theme } from "./theme.js" */

/** @typedef {{from: number, to: number}} TimeRange in seconds */

/** @typedef {{x: number, label: string}} Tick x: pixels of the page from the left */

/** @typedef {{left: number, right: number, kind: number}} Run of pixels that one kind dominates; excludes `right` */

export const AXIS_HEIGHT = 22; // pixels of the page, above the rows

const STEPS = [1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5];
STEPS.push(1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400);

/**
 * Ticks at round times, about 90 pixels apart.
 *
 * @param {number} from seconds
 * @param {number} to seconds
 * @param {number} width pixels of the page
 * @param {object} options
 * @param {number} [options.zero] the time labelled 0, in seconds
 * @param {number} [options.minStep] the smallest step, in seconds
 * @param {boolean} [options.minutes] whether fractions of seconds have minutes: `1:01.5`, not `61.5 s`
 * @returns {Tick[]}
 */
export function ticks(from, to, width, { zero = 0, minStep = 0, minutes = false } = {}) {
  const maxTicks = Math.max(2, width / 90);
  const fits = (/** @type {number} */ step) => step >= minStep && (to - from) / step <= maxTicks;
  const step = STEPS.find(fits) ?? 86400;
  /** @type {Tick[]} */
  const marks = [];
  for (let i = Math.ceil((from - zero) / step - 1e-9); zero + i * step <= to + 1e-6 * step; i++) {
    const at = i * step;
    const inMs = !minutes && Math.max(Math.abs(from - zero), Math.abs(to - zero)) < 1;
    marks.push({ x: ((zero + at - from) / (to - from)) * width, label: tickLabel(at, step, minutes, inMs) });
  }
  return marks;
}

/**
 * @param {number} at seconds
 * @param {number} step seconds
 * @param {boolean} minutes
 * @param {boolean} inMs whether all labels are in milliseconds
 */
function tickLabel(at, step, minutes, inMs) {
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  if (Math.abs(at) >= 60 && (step >= 1 || minutes)) return formatClock(at, digits);
  if (inMs) return `${(at * 1e3).toFixed(Math.max(0, digits - 3))} ms`;
  return `${at.toFixed(digits)} s`;
}

/**
 * @param {number} at seconds
 * @param {number} digits after the point
 */
function formatClock(at, digits) {
  const units = Math.round(Math.abs(at) * 10 ** digits);
  const whole = Math.floor(units / 10 ** digits);
  const fraction = digits ? `.${String(units % 10 ** digits).padStart(digits, "0")}` : "";
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  const start = hours ? `${hours}:${pad(minutes)}` : minutes;
  return `${at < 0 ? "−" : ""}${start}:${pad(whole % 60)}${fraction}`;
}

/**
 * Draw ticks on a canvas: lines from `top` to `bottom`, and their labels above them.
 *
 * @param {HTMLCanvasElement} canvas
 * @param {Theme} theme
 * @param {Tick[]} marks
 * @param {{top: number, bottom: number, ratio: number}} options in pixels of the page; device pixels of each
 */
export function drawAxis(canvas, theme, marks, { top, bottom, ratio }) {
  const context = getContext(canvas);
  Object.assign(context, { font: `${11 * ratio}px ${theme.font}`, textBaseline: "middle", textAlign: "left" });
  for (const { x, label } of marks) {
    const at = Math.min(Math.round(x * ratio), canvas.width - 1);
    context.fillStyle = theme.of("line");
    context.fillRect(at, top * ratio, Math.max(1, Math.round(ratio)), (bottom - top) * ratio);
    if (top < 12) continue;
    context.fillStyle = theme.of("muted");
    const width = context.measureText(label).width;
    context.fillText(label, Math.min(Math.max(0, at - width / 2), canvas.width - width), (top - 9) * ratio);
  }
}

/**
 * A range scaled by a factor around one time, which keeps its place.
 *
 * @param {TimeRange} range
 * @param {number} factor below 1 to zoom in
 * @param {object} options
 * @param {number} options.minLength seconds
 * @param {number} [options.time] by default the middle
 * @returns {TimeRange}
 */
export function rescaleRange({ from, to }, factor, { minLength, time = (from + to) / 2 }) {
  const length = Math.max((to - from) * factor, minLength);
  const start = time - ((time - from) / (to - from)) * length;
  return { from: start, to: start + length };
}

/**
 * The time at a pixel of a canvas that shows a range.
 *
 * @param {HTMLCanvasElement} canvas
 * @param {TimeRange} range
 * @param {number} x pixels of the page
 */
export function timeAt(canvas, { from, to }, x) {
  const width = canvas.clientWidth;
  return from + (Math.min(Math.max(0, x), width) / width) * (to - from);
}

/** Each kind's share of each pixel, for lines one below the other: by (line, pixel, kind), from 0 to 1. */
export class PixelShares {
  /**
   * @param {number} lines
   * @param {number} width device pixels
   * @param {number} kinds
   */
  constructor(lines, width, kinds) {
    this.width = width;
    this.kinds = kinds;
    this.share = new Float32Array(lines * width * kinds);
  }

  /**
   * Add what goes from `x0` to `x1`, in device pixels, which may be outside.
   *
   * @param {number} line
   * @param {number} kind
   * @param {number} x0
   * @param {number} x1
   * @param {number} weight of it in the line
   */
  cover(line, kind, x0, x1, weight = 1) {
    const { share, width, kinds } = this;
    const left = Math.max(0, x0);
    const right = Math.min(width, x1);
    for (let x = Math.floor(left); x < right; x++) {
      share[(line * width + x) * kinds + kind] += weight * (Math.min(right, x + 1) - Math.max(left, x));
    }
  }

  /**
   * The runs of pixels of a line of which one kind has the largest share, and more than `minShare`.
   *
   * @param {number} line
   * @param {number} minShare
   */
  runs(line, minShare) {
    const { share, width, kinds } = this;
    /** @type {Run[]} */
    const found = [];
    /** @type {Run | null} */
    let current = null;
    let at = line * width * kinds;
    for (let x = 0; x < width; x++) {
      let kind = -1;
      let largest = minShare;
      for (let k = 0; k < kinds; k++, at++) {
        if (share[at] > largest) {
          largest = share[at];
          kind = k;
        }
      }
      if (current && current.kind === kind) {
        current.right = x + 1;
      } else if (kind >= 0) {
        current = { left: x, right: x + 1, kind };
        found.push(current);
      } else {
        current = null;
      }
    }
    return found;
  }
}
