// @ts-check
// Which span is where.

import { forEachBetween, isRunning } from "../blocks.js";
import { everyRow } from "../rows.js";

/** @import { SpanSelection } from "../filter.js" */
/** @import { Rows } from "../rows.js" */
/** @import { Store } from "../store.js" */

/** @typedef {{row: number, lane: number, rows?: Rows}} Lane of a row; by default each rank has a row */

/**
 * The shortest span at a time in a lane, or else one at most `near` seconds away; -1: none.
 *
 * @param {Store} store
 * @param {SpanSelection & Lane & {time: number, near: number}} options
 */
export function spanAt(store, { row, lane, time, near, shown, ranks, config, rows = everyRow(ranks) }) {
  const { start, duration: length, label, rank } = store.columns;
  const { rowOf, indexOf } = rows;
  let best = -1;
  let bestLength = Infinity;
  forEachBetween(store, time - near, time + near, (i) => {
    if (rowOf[rank[i]] !== row || start[i] > time + near || start[i] + length[i] < time - near) return;
    const isShown = shown[label[i] * ranks.length + indexOf[rank[i]]];
    if (config.paints[store.labels[label[i]][0]].lane !== lane || !isShown) return;
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
 * @param {SpanSelection & {rank: number, time: number}} options
 */
export function ownCodeAt(store, { rank: wanted, time, ranks, ownCode, config }) {
  const { start, duration: length, label, rank } = store.columns;
  if (!ownCode[ranks.indexOf(wanted)]) return null;
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
export function nextSpan(store, { row, lane, time, direction, shown, ranks, config, rows = everyRow(ranks) }) {
  const { start, label, rank } = store.columns;
  const { rowOf, indexOf } = rows;
  let best = -1;
  for (let i = store.skip; i < store.count; i++) {
    if (rowOf[rank[i]] !== row || direction * (start[i] - time) <= 1e-9) continue;
    const isShown = shown[label[i] * ranks.length + indexOf[rank[i]]];
    if (config.paints[store.labels[label[i]][0]].lane !== lane || !isShown) continue;
    if (best < 0 || direction * (start[i] - start[best]) < 0) best = i;
  }
  return best;
}
