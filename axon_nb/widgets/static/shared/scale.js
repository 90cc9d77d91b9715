// @ts-check
// Scales of values: where ticks go, and from values to positions.

/** @typedef {{low: number, high: number, logarithmic: boolean}} Span of an axis */

/**
 * A step of 1, 2 or 5 times a power of ten, so that about `count` of them make up a length.
 *
 * @param {number} length
 * @param {number} count
 */
export function roundStep(length, count) {
  const rough = length / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const digit = rough / power;
  return (digit < 1.5 ? 1 : digit < 3.5 ? 2 : digit < 7.5 ? 5 : 10) * power;
}

/**
 * A step in bytes: 1, 2 or 5 times a power of ten of a binary unit.
 *
 * @param {number} length bytes
 * @param {number} count
 */
export function roundBytes(length, count) {
  const unit = 1024 ** Math.max(0, Math.floor(Math.log(Math.max(1, length)) / Math.log(1024) + 1e-9));
  return roundStep(length / unit, count) * unit;
}

/**
 * Multiples of a step within a span.
 *
 * @param {number} low
 * @param {number} high
 * @param {number} step
 */
export function multiples(low, high, step) {
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) {
    found.push(Number((i * step).toPrecision(12)));
  }
  return found;
}

/**
 * Ticks of a span, about `count` of them.
 *
 * @param {Span} span
 * @param {number} count
 * @param {(length: number, count: number) => number} step
 */
export function valueTicks({ low, high, logarithmic }, count, step = roundStep) {
  if (!logarithmic) return multiples(low, high, step(high - low || 1, count));
  const decades = Math.log10(high / low);
  const digits = decades > count ? [1] : decades > 1.2 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 8];
  /** @type {number[]} */
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const digit of digits) {
      const value = Number((digit * 10 ** power).toPrecision(12));
      if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
    }
  }
  const every = Math.max(1, Math.ceil(found.length / (2 * count)));
  return found.length < 2 ? multiples(low, high, step(high - low || 1, count)) : found.filter((_, i) => !(i % every));
}

/**
 * A span whose ends are ticks.
 *
 * @param {number} low
 * @param {number} high
 * @param {number} count about as many ticks
 * @param {(length: number, count: number) => number} step
 * @returns {Span}
 */
export function roundSpan(low, high, count, step = roundStep) {
  if (low === high) {
    const margin = Math.abs(low) * 0.1 || 1;
    [low, high] = low === 0 ? [0, 1] : [low - margin, high + margin];
  }
  const size = step(high - low, count);
  const [first, last] = [Math.floor(low / size + 1e-9), Math.ceil(high / size - 1e-9)];
  return { low: first * size, high: last * size, logarithmic: false };
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
