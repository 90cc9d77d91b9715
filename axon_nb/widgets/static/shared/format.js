// @ts-check
// Numbers as text.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/**
 * Bytes, to three digits.
 *
 * @param {number} bytes
 */
export function formatBytes(bytes) {
  let unit = 0;
  for (; bytes >= 999.5 && unit < UNITS.length - 1; unit++) bytes /= 1024;
  return `${unit ? bytes.toPrecision(3) : Math.round(bytes)} ${UNITS[unit]}`;
}

/**
 * A number with at least two digits.
 *
 * @param {number} number
 */
export function pad(number) {
  return String(number).padStart(2, "0");
}

/**
 * Seconds of a cell, as the kernel formats them: from 0.01 s on.
 *
 * @param {number} value
 */
export function formatSeconds(value) {
  if (value < 0.995) return `${value.toFixed(2)} s`;
  if (value < 99.95) return `${value.toFixed(1)} s`;
  const whole = Math.round(value);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${pad(whole % 60)} s`;
  const minutes = Math.round(value / 60);
  return `${Math.floor(minutes / 60)} h ${pad(minutes % 60)} min`;
}

/**
 * Seconds of a span: from tenths of a microsecond on.
 *
 * @param {number} value
 */
export function formatDuration(value) {
  if (value < 1e-3) return `${(value * 1e6).toFixed(value < 1e-5 ? 1 : 0)} µs`;
  if (value < 0.9995) return `${Number((value * 1e3).toPrecision(3))} ms`;
  if (value < 99.95) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  const whole = Math.round(value);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${pad(whole % 60)} s`;
  return `${Math.floor(whole / 3600)} h ${pad(Math.floor(whole / 60) % 60)} min`;
}
