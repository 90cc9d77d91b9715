// @ts-check
// What part of a strip is on show, and what lies where.

import { PixelShares } from "../shared/time_axis.js";
import { openEnd } from "./store.js";

/** @import { Stretch } from "../shared/time_axis.js" */
/** @import { Config, Segment } from "./store.js" */

/** @typedef {null | {follow: true, span: number} | (Stretch & {follow?: undefined})} View null: everything */

/** @typedef {{view: View}} Step what a key has led to */

const SHORTEST = 5; // seconds that the axis spans at least, so that the first samples do not fill it
const NARROWEST = 0.05; // seconds that keys zoom in to

/**
 * The stretch of time on show.
 *
 * @param {View} view
 * @param {number} now
 * @returns {Stretch}
 */
export function visible(view, now) {
  if (!view) return { from: 0, to: Math.max(now, SHORTEST) };
  return view.follow ? { from: Math.max(0, now - view.span), to: Math.max(now, view.span) } : view;
}

/**
 * The view after a key, or null where the key has no meaning.
 *
 * @param {View} view
 * @param {string} key
 * @param {number} now
 * @returns {Step | null}
 */
export function navigate(view, key, now) {
  if (key === "+" || key === "=") return { view: zoomIn(view, now) };
  if (key === "-" || key === "_") return { view: zoomOut(view, now) };
  if (key === "Home") return { view: null };
  if (key !== "ArrowLeft" && key !== "ArrowRight" && key !== "End") return null;
  if (!view) return { view };
  const { from, to } = visible(view, now);
  const span = to - from;
  if (key === "End") return { view: { follow: true, span } };
  const shift = key === "ArrowLeft" ? -span / 5 : span / 5;
  const start = Math.min(Math.max(0, from + shift), Math.max(0, now - span));
  return { view: start + span >= now ? { follow: true, span } : { from: start, to: start + span } };
}

/**
 * @param {View} view
 * @param {number} now
 * @returns {View}
 */
function zoomIn(view, now) {
  const { from, to } = visible(view, now);
  const span = Math.max((to - from) / 2, NARROWEST);
  if (!view || view.follow) return { follow: true, span };
  const middle = (from + to) / 2;
  return { from: middle - span / 2, to: middle + span / 2 };
}

/**
 * @param {View} view
 * @param {number} now
 * @returns {View}
 */
function zoomOut(view, now) {
  const { from, to } = visible(view, now);
  const span = 2 * (to - from);
  if (span >= Math.max(now, SHORTEST)) return null;
  if (!view || view.follow) return { follow: true, span };
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

const LEAST_SHARE = 0.02; // of a pixel that is drawn

/**
 * What a row shows in each of `width` pixels: the activity that takes most of its time.
 *
 * @param {Segment[]} segments
 * @param {Stretch & {width: number, now: number, config: Config}} options
 */
export function rowRuns(segments, { from, to, width, now, config }) {
  const scale = width / (to - from);
  const shares = new PixelShares(1, width, config.paints.length);
  const last = segments.length - 1;
  // An open last segment ends before `from` by its last sample, yet may reach into the view.
  for (let i = Math.min(firstEndingAfter(segments, from), Math.max(0, last)); i <= last; i++) {
    const segment = segments[i];
    if (segment.start > to) break;
    const end = i === last ? openEnd(segment, now, config) : segment.end;
    shares.cover(0, segment.activity, (segment.start - from) * scale, (end - from) * scale);
  }
  return shares.runs(0, LEAST_SHARE);
}

/**
 * The segment of a row at a time, with the end that is on show; null where nothing is known.
 *
 * @param {Segment[]} segments
 * @param {number} time
 * @param {number} now
 * @param {Config} config
 */
export function hit(segments, time, now, config) {
  const last = segments.length - 1;
  const i = Math.min(firstEndingAfter(segments, time), last);
  if (i < 0 || segments[i].start > time) return null;
  const end = i === last ? openEnd(segments[i], now, config) : segments[i].end;
  return time <= end ? { segment: segments[i], end } : null;
}

/** @param {number} numRows */
export function rowHeight(numRows) {
  return numRows <= 8 ? 24 : numRows <= 24 ? 18 : 14;
}
