// @ts-check
// Which range of time a strip shows, and what its rows show there.

import { PixelShares, rescaleRange } from "../shared/time_axis.js";
import { openEnd } from "./store.js";

/** @import { TimeRange } from "../shared/time_axis.js" */
/** @import { Config, Segment } from "./store.js" */

/** @typedef {null | {follow: true, span: number} | (TimeRange & {follow?: undefined})} Zoom null: everything */

/** @typedef {{zoom: Zoom}} Step the result of a key */

const MIN_AXIS = 5; // seconds, so that the first samples do not fill the axis
const MIN_SPAN = 0.05; // seconds that keys zoom in to

/**
 * The range of time that is shown.
 *
 * @param {Zoom} zoom
 * @param {number} now
 * @param {boolean} [finished] whether it ends there
 * @returns {TimeRange}
 */
export function visibleRange(zoom, now, finished = false) {
  if (!zoom) return { from: 0, to: finished ? Math.max(now, MIN_SPAN) : Math.max(now, MIN_AXIS) };
  return zoom.follow ? { from: Math.max(0, now - zoom.span), to: Math.max(now, zoom.span) } : zoom;
}

/**
 * The zoom after a key, or null if the key has no meaning.
 *
 * @param {Zoom} zoom
 * @param {string} key
 * @param {number} now
 * @returns {Step | null}
 */
export function navigate(zoom, key, now) {
  if (key === "+" || key === "=") return { zoom: zoomIn(zoom, now) };
  if (key === "-" || key === "_") return { zoom: zoomOut(zoom, now) };
  if (key === "Home") return { zoom: null };
  if (key !== "ArrowLeft" && key !== "ArrowRight" && key !== "End") return null;
  if (!zoom) return { zoom };
  const { from, to } = visibleRange(zoom, now);
  const span = to - from;
  if (key === "End") return { zoom: { follow: true, span } };
  const shift = key === "ArrowLeft" ? -span / 5 : span / 5;
  const start = Math.min(Math.max(0, from + shift), Math.max(0, now - span));
  return { zoom: start + span >= now ? { follow: true, span } : { from: start, to: start + span } };
}

/**
 * @param {Zoom} zoom
 * @param {number} now
 * @returns {Zoom}
 */
function zoomIn(zoom, now) {
  const range = rescaleRange(visibleRange(zoom, now), 0.5, { minLength: MIN_SPAN });
  return !zoom || zoom.follow ? { follow: true, span: range.to - range.from } : range;
}

/**
 * @param {Zoom} zoom
 * @param {number} now
 * @returns {Zoom}
 */
function zoomOut(zoom, now) {
  const { from, to } = visibleRange(zoom, now);
  const span = 2 * (to - from);
  if (span >= Math.max(now, MIN_AXIS)) return null;
  if (!zoom || zoom.follow) return { follow: true, span };
  const start = Math.min(Math.max(0, from - span / 4), now - span);
  return { from: start, to: start + span };
}

/**
 * @param {Segment[]} segments
 * @param {number} time
 */
function firstEndingAfter(segments, time) {
  let low = 0;
  let high = segments.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (segments[middle].end < time) low = middle + 1;
    else high = middle;
  }
  return low;
}

const MIN_SHARE = 0.02; // of a pixel that is drawn

/**
 * What a row shows in each of `width` pixels: the activity with the largest share of its time.
 *
 * @param {Segment[]} segments
 * @param {TimeRange & {width: number, now: number, config: Config}} options
 */
export function rowRuns(segments, { from, to, width, now, config }) {
  const scale = width / (to - from);
  const shares = new PixelShares(1, width, config.paints.length);
  const last = segments.length - 1;
  // The last sample of an open segment may be before `from`, although the segment reaches into the view.
  for (let i = Math.min(firstEndingAfter(segments, from), Math.max(0, last)); i <= last; i++) {
    const segment = segments[i];
    if (segment.start > to) break;
    const end = i === last ? openEnd(segment, now, config) : segment.end;
    shares.cover(0, segment.activity, (segment.start - from) * scale, (end - from) * scale);
  }
  return shares.runs(0, MIN_SHARE);
}

/**
 * The segment of a row at a time, with the end that is shown; null if the activity is unknown.
 *
 * @param {Segment[]} segments
 * @param {number} time
 * @param {number} now
 * @param {Config} config
 */
export function segmentAt(segments, time, now, config) {
  const last = segments.length - 1;
  const i = Math.min(firstEndingAfter(segments, time), last);
  if (i < 0 || segments[i].start > time) return null;
  const end = i === last ? openEnd(segments[i], now, config) : segments[i].end;
  return time <= end ? { segment: segments[i], end } : null;
}

const LABEL_HEIGHT = 14;
const MAX_LABELS = 64;
const DENSE_HEIGHT = 896; // of all rows if there are more: they become a picture, in which a rank is a line

/** @param {number} numRows */
export function rowHeight(numRows) {
  if (numRows > MAX_LABELS) return Math.max(1, Math.floor(DENSE_HEIGHT / numRows));
  return numRows <= 8 ? 24 : numRows <= 24 ? 18 : LABEL_HEIGHT;
}

/**
 * How many rows share a label: as many as it takes for the label to fit.
 *
 * @param {number} numRows
 */
export function rowsPerLabel(numRows) {
  return Math.max(1, Math.ceil(LABEL_HEIGHT / rowHeight(numRows)));
}

/**
 * The space above and below a row's boxes.
 *
 * @param {number} height
 */
export function rowMargin(height) {
  return height >= LABEL_HEIGHT ? 3 : height >= 4 ? 1 : 0;
}
