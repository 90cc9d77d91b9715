// @ts-check
// Which range of time a timeline shows, and which spans are where.

import { PixelShares, rescaleRange } from "../shared/time_axis.js";
import { extent, forEachBetween, isRunning, MIN_AXIS } from "./blocks.js";
import { everyRow } from "./rows.js";

/** @import { TimeRange } from "../shared/time_axis.js" */
/** @import { Derived } from "./derived.js" */
/** @import { SpanSelection } from "./filter.js" */
/** @import { Rows } from "./rows.js" */
/** @import { Store } from "./store.js" */

/**
 * Null: the running cell, or the last one; `all`: everything; with `follow`: the newest `span` seconds.
 *
 * @typedef {null | "all" | {follow: true, span: number} | (TimeRange & {follow?: undefined})} Zoom
 */

/** @typedef {{zoom: Zoom}} Step the result of a key */

/** @typedef {[top: number, height: number]} Band of a rank's row, in pixels of the page */

/** @typedef {{height: number, cell: Band, lanes: [Band, Band]}} Geometry of a rank's row: its cell, code, communication */

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
 * @param {number} numRows
 * @returns {Geometry}
 */
export function geometry(numRows) {
  /** @type {(height: number, cell: Band, code: Band, communication: Band) => Geometry} */
  const row = (height, cell, code, communication) => ({ height, cell, lanes: [code, communication] });
  if (numRows <= 8) return row(44, [3, 2], [7, 19], [28, 11]);
  if (numRows <= 24) return row(29, [2, 1], [4, 13], [18, 8]);
  return row(16, [0, 1], [1, 8], [10, 5]);
}

const MAX_LABELLED = 3000; // visible spans that may be written on

export const MIN_SHARE = 0.004; // of a pixel that is drawn

/**
 * Each kind's share of each pixel; line 2 * row + lane is a lane of a row, over the ranks of the row. In the lane of
 * communication, the time before the last rank has started is waiting, and so are the tails of backwards in the lane
 * of code. What is left of a cell is the rank's own code. Also returns how many spans were `found`, the indices of
 * `cells`, and those of `labelled` spans, or null if there are too many.
 *
 * @param {Store} store
 * @param {SpanSelection & TimeRange & {width: number, derived: Derived, rows?: Rows}} options width: device pixels
 */
export function pixelShares(store, options) {
  const { ranks, from, to, width, shown, ownCode, hidesWaits, config, derived } = options;
  const { start, duration: length, late, label, rank } = store.columns;
  const rows = options.rows ?? everyRow(ranks);
  const { list, rowOf, indexOf } = rows;
  const kindOf = Uint8Array.from(store.labels, ([kind]) => kind);
  const lanes = config.paints.map((paint) => paint.lane);
  const code = Object.fromEntries(config.paints.map((paint, i) => [paint.kind, i]));
  const pixels = new PixelShares(list.length * 2, width, lanes.length);
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
    const place = indexOf[rank[i]];
    const isShown = shown[label[i] * ranks.length + place];
    const weight = 1 / list[row].ranks.length;
    if (lanes[kind] < 0) {
      if (ownCode[place]) pixels.cover(2 * row, code.other, x0, x1, weight);
      if (isShown) cells.push(i);
      return;
    }
    if (!isShown) return;
    found++;
    if (found > MAX_LABELLED) labelled = null;
    else labelled?.push(i);
    const line = row * 2 + lanes[kind];
    const ready = lanes[kind] === 1 && !hidesWaits ? Math.min(x1, x0 + late[i] * scale) : x0;
    if (ready > x0) pixels.cover(line, code.wait, x0, ready, weight);
    pixels.cover(line, kind, ready, x1, weight);
    const tail = kind === code.backward && !hidesWaits ? derived.tailOf(store.first + i) : undefined;
    if (tail) pixels.cover(line, code.wait, (tail.from - from) * scale, (tail.to - from) * scale, weight);
  });
  if (isRunning(store)) coverRunningCell(pixels, store, { rows, from, scale, ownCode, derived, kind: code.other });
  settle(pixels, list.length, code);
  return { pixels, found, cells, labelled };
}

/**
 * Cover the known part of the running cell, whose span arrives only when it has ended.
 *
 * @param {PixelShares} pixels
 * @param {Store} store
 * @param {{rows: Rows, from: number, scale: number, ownCode: Uint8Array, derived: Derived, kind: number}} options
 */
function coverRunningCell(pixels, store, { rows, from, scale, ownCode, derived, kind }) {
  const start = Number(store.focus[0]);
  rows.list.forEach(({ ranks }, row) => {
    for (const rank of ranks) {
      const end = derived.endOf(rank);
      if (!ownCode[rows.indexOf[rank]] || end <= start) continue;
      pixels.cover(2 * row, kind, (start - from) * scale, (end - from) * scale, 1 / ranks.length);
    }
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
