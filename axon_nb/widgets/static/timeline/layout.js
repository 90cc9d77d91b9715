// @ts-check
// What part of a timeline is on show, and what lies where.

import { PixelShares } from "../shared/time_axis.js";
import { between, extent, isRunning, SHORTEST } from "./store.js";

/** @import { Stretch } from "../shared/time_axis.js" */
/** @import { Selection } from "./filter.js" */
/** @import { Config, Store } from "./store.js" */

/**
 * Null: the cell that runs, or the last one; `all`: everything; with `follow`: the newest, so many seconds of it.
 *
 * @typedef {null | "all" | {follow: true, span: number} | (Stretch & {follow?: undefined})} View
 */

/** @typedef {{view: View}} Step what a key has led to */

/** @typedef {[top: number, height: number]} Band of a rank's row, in pixels of the page */

/** @typedef {{height: number, cell: Band, lanes: [Band, Band]}} Geometry of a rank's row: its cell, code, communication */

/** @typedef {{rank: number, row: number, lane: number}} Lane of a rank */

export const NARROWEST = 2e-5; // seconds that can be zoomed in to

// ---- what is on show -----------------------------------------------------------------------------------------------

/**
 * The stretch of time on show.
 *
 * @param {View} view
 * @param {Store} store
 * @param {number} now
 * @returns {Stretch}
 */
export function visible(view, store, now) {
  if (view === "all") return extent(store, now);
  const [begin, end] = store.focus;
  const whole = begin === null ? extent(store, now) : { from: begin, to: now };
  const from = whole.from;
  const to = Math.max(end ?? whole.to, from + SHORTEST / 100);
  if (!view) return { from, to: isRunning(store) ? Math.max(to, from + SHORTEST) : to + (to - from) / 200 };
  return view.follow ? { from: to - view.span, to } : view;
}

/**
 * The view after a key, or null where the key has no meaning.
 *
 * @param {View} view
 * @param {string} key
 * @param {Store} store
 * @param {number} now
 * @returns {Step | null}
 */
export function navigate(view, key, store, now) {
  const { from, to } = visible(view, store, now);
  const span = to - from;
  if (key === "+" || key === "=") return { view: zoomIn(view, store, { from, to }) };
  if (key === "-" || key === "_") return { view: zoomOut(view, store, now) };
  if (key === "ArrowLeft") return { view: { from: from - span / 5, to: to - span / 5 } };
  if (key === "ArrowRight") return { view: { from: from + span / 5, to: to + span / 5 } };
  if (key === "End") return { view: { follow: true, span } };
  if (key === "Home") return { view: null };
  if (key === "a") return { view: "all" };
  return null;
}

/**
 * @param {View} view
 * @param {Store} store
 * @param {Stretch} stretch
 * @returns {View}
 */
function zoomIn(view, store, { from, to }) {
  const span = Math.max((to - from) / 2, NARROWEST);
  const follows = !view || (view !== "all" && view.follow);
  if (follows && isRunning(store)) return { follow: true, span };
  const middle = (from + to) / 2;
  return { from: middle - span / 2, to: middle + span / 2 };
}

/**
 * @param {View} view
 * @param {Store} store
 * @param {number} now
 * @returns {View}
 */
function zoomOut(view, store, now) {
  const { from, to } = visible(view, store, now);
  const span = 2 * (to - from);
  if (view && view !== "all" && view.follow) {
    const latest = visible(null, store, now);
    return span >= latest.to - latest.from ? null : { follow: true, span };
  }
  const whole = extent(store, now);
  if (span >= whole.to - whole.from) return "all";
  const middle = (from + to) / 2;
  return { from: middle - span / 2, to: middle + span / 2 };
}

/**
 * A stretch of time, longer by a factor, in which a time stays where it is.
 *
 * @param {Stretch} stretch
 * @param {number} time
 * @param {number} factor
 */
export function zoomAt({ from, to }, time, factor) {
  const span = Math.max((to - from) * factor, NARROWEST);
  const left = time - ((time - from) / (to - from)) * span;
  return { from: left, to: left + span };
}

// ---- layout --------------------------------------------------------------------------------------------------------

/**
 * @param {number} numRanks
 * @returns {Geometry}
 */
export function geometry(numRanks) {
  /** @type {(height: number, cell: Band, code: Band, communication: Band) => Geometry} */
  const row = (height, cell, code, communication) => ({ height, cell, lanes: [code, communication] });
  if (numRanks <= 8) return row(36, [2, 2], [6, 16], [23, 10]);
  if (numRanks <= 24) return row(25, [1, 2], [4, 11], [16, 7]);
  return row(15, [0, 1], [2, 7], [9, 5]);
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

const FEW = 3000; // spans in sight that may be written on

export const LEAST_SHARE = 0.004; // of a pixel that is drawn

/**
 * How much of each pixel each kind takes, where line 2 * row + lane is a lane of a rank. In the lane of communication,
 * what comes before the last rank has begun is waiting. Besides: how many spans were `found`, the indices of `cells`,
 * and of the `few` that are there; null when there are more.
 *
 * @param {Store} store
 * @param {Selection & Stretch & {width: number}} options width: device pixels
 */
export function shares(store, { ranks, from, to, width, shown, config }) {
  const { start, duration: length, late, label, rank } = store.columns;
  const rowOf = rowsOf(ranks);
  const kindOf = Uint8Array.from(store.labels, ([kind]) => kind);
  const lanes = config.paints.map((paint) => paint.lane);
  const waiting = config.paints.findIndex((paint) => paint.kind === "wait");
  const pixels = new PixelShares(ranks.length * 2, width, lanes.length);
  const scale = width / (to - from);
  /** @type {number[]} */
  const cells = [];
  /** @type {number[] | null} */
  let few = [];
  let found = 0;
  between(store, from, to, (i) => {
    const x0 = (start[i] - from) * scale;
    const x1 = x0 + Math.max(length[i] * scale, 1e-3);
    if (x0 > width || x1 < 0) return;
    const row = rowOf[rank[i]] ?? -1;
    if (row < 0 || !shown[label[i] * ranks.length + row]) return;
    const kind = kindOf[label[i]];
    if (lanes[kind] < 0) {
      cells.push(i);
      return;
    }
    found++;
    if (found > FEW) few = null;
    else few?.push(i);
    const line = row * 2 + lanes[kind];
    const ready = lanes[kind] === 1 ? Math.min(x1, x0 + late[i] * scale) : x0;
    if (ready > x0) pixels.cover(line, waiting, x0, ready);
    pixels.cover(line, kind, ready, x1);
  });
  subtractWaits(pixels, ranks.length, config);
  return { pixels, found, cells, few };
}

/**
 * In the lanes of code, what waits does not compute.
 *
 * @param {PixelShares} pixels
 * @param {number} rows
 * @param {Config} config
 */
function subtractWaits({ share, width, kinds }, rows, config) {
  const code = Object.fromEntries(config.paints.map((paint, i) => [paint.kind, i]));
  const computing = [code.forward, code.backward, code.optimizer];
  for (let row = 0; row < rows; row++) {
    for (let x = 0; x < width; x++) {
      const at = (2 * row * width + x) * kinds;
      const waits = share[at + code.wait];
      if (waits) for (const kind of computing) share[at + kind] -= Math.min(waits, share[at + kind]);
    }
  }
}

/**
 * The span at a time in a lane: the shortest that is there, or one at most `near` seconds away; -1: none.
 *
 * @param {Store} store
 * @param {Selection & Lane & {time: number, near: number}} options
 */
export function hit(store, { rank: wanted, row, lane, time, near, shown, ranks, config }) {
  const { start, duration: length, label, rank } = store.columns;
  let best = -1;
  let least = Infinity;
  between(store, time - near, time + near, (i) => {
    if (rank[i] !== wanted || start[i] > time + near || start[i] + length[i] < time - near) return;
    if (config.paints[store.labels[label[i]][0]].lane !== lane || !shown[label[i] * ranks.length + row]) return;
    const inside = start[i] <= time && time <= start[i] + length[i];
    const measure = length[i] + (inside ? 0 : 1e6);
    if (measure <= least) [least, best] = [measure, i];
  });
  return best;
}

/**
 * The next span (`way` 1) or the one before (-1) in a lane, after or before a time; -1: none.
 *
 * @param {Store} store
 * @param {Selection & Lane & {time: number, way: number}} options
 */
export function neighbour(store, { rank: wanted, row, lane, time, way, shown, ranks, config }) {
  const { start, label, rank } = store.columns;
  let best = -1;
  for (let i = store.skip; i < store.count; i++) {
    if (rank[i] !== wanted || way * (start[i] - time) <= 1e-9) continue;
    if (config.paints[store.labels[label[i]][0]].lane !== lane || !shown[label[i] * ranks.length + row]) continue;
    if (best < 0 || way * (start[i] - start[best]) < 0) best = i;
  }
  return best;
}
