// @ts-check
// Which range of time a timeline shows, and which spans are where.

import { PixelShares, rescaleRange } from "../shared/time_axis.js";
import { extent, forEachBetween, isRunning, MIN_AXIS } from "./blocks.js";

/** @import { TimeRange } from "../shared/time_axis.js" */
/** @import { Derived } from "./derived.js" */
/** @import { SpanSelection } from "./filter.js" */
/** @import { Store } from "./store.js" */

/**
 * Null: the running cell, or the last one; `all`: everything; with `follow`: the newest `span` seconds.
 *
 * @typedef {null | "all" | {follow: true, span: number} | (TimeRange & {follow?: undefined})} Zoom
 */

/** @typedef {{zoom: Zoom}} Step the result of a key */

/** @typedef {[top: number, height: number]} Band of a rank's row, in pixels of the page */

/** @typedef {{height: number, cell: Band, lanes: [Band, Band]}} Geometry of a rank's row: its cell, code, communication */

/** @typedef {{rank: number, row: number, lane: number}} Lane of a rank */

export const MIN_SPAN = 2e-5; // seconds that can be zoomed in to

// ---- the visible range ---------------------------------------------------------------------------------------------

/**
 * The range of time that is shown.
 *
 * @param {Zoom} zoom
 * @param {Store} store
 * @param {number} now
 * @returns {TimeRange}
 */
export function visibleRange(zoom, store, now) {
  if (zoom === "all") return extent(store, now);
  const [start, end] = store.focus;
  const full = start === null ? extent(store, now) : { from: start, to: now };
  const from = full.from;
  const to = Math.max(end ?? full.to, from + MIN_AXIS / 100);
  if (!zoom) return { from, to: isRunning(store) ? Math.max(to, from + MIN_AXIS) : to + (to - from) / 200 };
  return zoom.follow ? { from: to - zoom.span, to } : zoom;
}

/**
 * The zoom after a key, or null if the key has no meaning.
 *
 * @param {Zoom} zoom
 * @param {string} key
 * @param {Store} store
 * @param {number} now
 * @returns {Step | null}
 */
export function navigate(zoom, key, store, now) {
  const { from, to } = visibleRange(zoom, store, now);
  const span = to - from;
  if (key === "+" || key === "=") return { zoom: zoomIn(zoom, store, { from, to }) };
  if (key === "-" || key === "_") return { zoom: zoomOut(zoom, store, now) };
  if (key === "ArrowLeft") return { zoom: { from: from - span / 5, to: to - span / 5 } };
  if (key === "ArrowRight") return { zoom: { from: from + span / 5, to: to + span / 5 } };
  if (key === "End") return { zoom: { follow: true, span } };
  if (key === "Home") return { zoom: null };
  if (key === "a") return { zoom: "all" };
  return null;
}

/**
 * @param {Zoom} zoom
 * @param {Store} store
 * @param {TimeRange} range
 * @returns {Zoom}
 */
function zoomIn(zoom, store, range) {
  const { from, to } = rescaleRange(range, 0.5, { minLength: MIN_SPAN });
  const follows = !zoom || (zoom !== "all" && zoom.follow);
  return follows && isRunning(store) ? { follow: true, span: to - from } : { from, to };
}

/**
 * @param {Zoom} zoom
 * @param {Store} store
 * @param {number} now
 * @returns {Zoom}
 */
function zoomOut(zoom, store, now) {
  const range = rescaleRange(visibleRange(zoom, store, now), 2, { minLength: MIN_SPAN });
  const span = range.to - range.from;
  if (zoom && zoom !== "all" && zoom.follow) {
    const latest = visibleRange(null, store, now);
    return span >= latest.to - latest.from ? null : { follow: true, span };
  }
  const full = extent(store, now);
  return span >= full.to - full.from ? "all" : range;
}

// ---- layout --------------------------------------------------------------------------------------------------------

/**
 * @param {number} numRanks
 * @returns {Geometry}
 */
export function geometry(numRanks) {
  /** @type {(height: number, cell: Band, code: Band, communication: Band) => Geometry} */
  const row = (height, cell, code, communication) => ({ height, cell, lanes: [code, communication] });
  if (numRanks <= 8) return row(44, [3, 2], [7, 19], [28, 11]);
  if (numRanks <= 24) return row(29, [2, 1], [4, 13], [18, 8]);
  return row(16, [0, 1], [1, 8], [10, 5]);
}

/**
 * The row of each rank; -1: none.
 *
 * @param {number[]} ranks
 */
function rowsOf(ranks) {
  const rows = new Int16Array(Math.max(0, ...ranks) + 1).fill(-1);
  ranks.forEach((rank, row) => {
    rows[rank] = row;
  });
  return rows;
}

const MAX_LABELLED = 3000; // visible spans that may be written on

export const MIN_SHARE = 0.004; // of a pixel that is drawn

/**
 * Each kind's share of each pixel; line 2 * row + lane is a lane of a rank. In the lane of communication, the time
 * before the last rank has started is waiting, and in the lane of code the tails of backwards are; what is left of a
 * cell is the rank's own code. Also returns how many spans were `found`, the indices of `cells`, and those of
 * `labelled` spans, or null if there are too many.
 *
 * @param {Store} store
 * @param {SpanSelection & TimeRange & {width: number, derived: Derived}} options width: device pixels
 */
export function pixelShares(store, { ranks, from, to, width, shown, ownCode, hidesWaits, config, derived }) {
  const { start, duration: length, late, label, rank } = store.columns;
  const rowOf = rowsOf(ranks);
  const kindOf = Uint8Array.from(store.labels, ([kind]) => kind);
  const lanes = config.paints.map((paint) => paint.lane);
  const code = Object.fromEntries(config.paints.map((paint, i) => [paint.kind, i]));
  const pixels = new PixelShares(ranks.length * 2, width, lanes.length);
  const scale = width / (to - from);
  /** @type {number[]} */
  const cells = [];
  /** @type {number[] | null} */
  let labelled = [];
  let found = 0;
  forEachBetween(store, from, to, (i) => {
    const x0 = (start[i] - from) * scale;
    const x1 = x0 + Math.max(length[i] * scale, 1e-3);
    if (x0 > width || x1 < 0) return;
    const row = rowOf[rank[i]] ?? -1;
    if (row < 0) return;
    const kind = kindOf[label[i]];
    const isShown = shown[label[i] * ranks.length + row];
    if (lanes[kind] < 0) {
      if (ownCode[row]) pixels.cover(2 * row, code.other, x0, x1);
      if (isShown) cells.push(i);
      return;
    }
    if (!isShown) return;
    found++;
    if (found > MAX_LABELLED) labelled = null;
    else labelled?.push(i);
    const line = row * 2 + lanes[kind];
    const ready = lanes[kind] === 1 && !hidesWaits ? Math.min(x1, x0 + late[i] * scale) : x0;
    if (ready > x0) pixels.cover(line, code.wait, x0, ready);
    pixels.cover(line, kind, ready, x1);
    const tail = kind === code.backward && !hidesWaits ? derived.tailOf(store.first + i) : undefined;
    if (tail) pixels.cover(line, code.wait, (tail.from - from) * scale, (tail.to - from) * scale);
  });
  if (isRunning(store)) coverRunningCell(pixels, store, { ranks, from, scale, ownCode, derived, kind: code.other });
  settle(pixels, ranks.length, code);
  return { pixels, found, cells, labelled };
}

/**
 * Cover what is known of the running cell, whose span comes when it has ended.
 *
 * @param {PixelShares} pixels
 * @param {Store} store
 * @param {{ranks: number[], from: number, scale: number, ownCode: Uint8Array, derived: Derived, kind: number}} options
 */
function coverRunningCell(pixels, store, { ranks, from, scale, ownCode, derived, kind }) {
  const start = Number(store.focus[0]);
  ranks.forEach((rank, row) => {
    const end = derived.endOf(rank);
    if (ownCode[row] && end > start) pixels.cover(2 * row, kind, (start - from) * scale, (end - from) * scale);
  });
}

/**
 * In the lanes of code, subtract waiting from computing, and both from the cell: the rest is the rank's own code.
 *
 * @param {PixelShares} pixels
 * @param {number} rows
 * @param {Record<string, number>} code of each kind
 */
function settle({ share, width, kinds }, rows, code) {
  const computing = [code.forward, code.backward, code.optimizer];
  for (let row = 0; row < rows; row++) {
    for (let x = 0; x < width; x++) {
      const at = (2 * row * width + x) * kinds;
      const waits = Math.min(1, share[at + code.wait]);
      share[at + code.wait] = waits;
      let rest = Math.min(1, share[at + code.other]) - waits;
      for (const kind of computing) {
        if (!share[at + kind]) continue;
        if (waits) share[at + kind] -= Math.min(waits, share[at + kind]);
        rest -= share[at + kind];
      }
      share[at + code.other] = Math.max(0, rest);
    }
  }
}

/**
 * The shortest span at a time in a lane, or else one at most `near` seconds away; -1: none.
 *
 * @param {Store} store
 * @param {SpanSelection & Lane & {time: number, near: number}} options
 */
export function spanAt(store, { rank: wanted, row, lane, time, near, shown, ranks, config }) {
  const { start, duration: length, label, rank } = store.columns;
  let best = -1;
  let bestLength = Infinity;
  forEachBetween(store, time - near, time + near, (i) => {
    if (rank[i] !== wanted || start[i] > time + near || start[i] + length[i] < time - near) return;
    if (config.paints[store.labels[label[i]][0]].lane !== lane || !shown[label[i] * ranks.length + row]) return;
    const isInside = start[i] <= time && time <= start[i] + length[i];
    const rankedLength = length[i] + (isInside ? 0 : 1e6);
    if (rankedLength <= bestLength) [bestLength, best] = [rankedLength, i];
  });
  return best;
}

/**
 * The stretch of a rank's own code at a time: in a cell and in no span of the lane; null: none.
 *
 * @param {Store} store
 * @param {SpanSelection & Lane & {time: number, near: number}} options
 */
export function ownCodeAt(store, { rank: wanted, row, time, ownCode, config }) {
  const { start, duration: length, label, rank } = store.columns;
  if (!ownCode[row]) return null;
  let [from, to] = [-Infinity, Infinity];
  let isInCell = isRunning(store) && time >= Number(store.focus[0]);
  if (isInCell) from = Number(store.focus[0]);
  for (let i = store.skip; i < store.count; i++) {
    if (rank[i] !== wanted) continue;
    const { lane } = config.paints[store.labels[label[i]][0]];
    const end = start[i] + length[i];
    if (lane < 0 && start[i] <= time && time <= end) {
      isInCell = true;
      [from, to] = [Math.max(from, start[i]), Math.min(to, end)];
    } else if (lane === 0) {
      if (end <= time) from = Math.max(from, end);
      else if (start[i] >= time) to = Math.min(to, start[i]);
    }
  }
  return isInCell && from < to && Number.isFinite(to) ? { from, to } : null;
}

/**
 * The next span (`direction` 1) or the previous one (-1) in a lane, after or before a time; -1: none.
 *
 * @param {Store} store
 * @param {SpanSelection & Lane & {time: number, direction: number}} options
 */
export function nextSpan(store, { rank: wanted, row, lane, time, direction, shown, ranks, config }) {
  const { start, label, rank } = store.columns;
  let best = -1;
  for (let i = store.skip; i < store.count; i++) {
    if (rank[i] !== wanted || direction * (start[i] - time) <= 1e-9) continue;
    if (config.paints[store.labels[label[i]][0]].lane !== lane || !shown[label[i] * ranks.length + row]) continue;
    if (best < 0 || direction * (start[i] - start[best]) < 0) best = i;
  }
  return best;
}
