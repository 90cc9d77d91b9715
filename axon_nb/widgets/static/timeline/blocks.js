// @ts-check
// Spans by time: blocks of spans that a search can skip, and the range that covers all of them.

/** @import { TimeRange } from "../shared/time_axis.js" */
/** @import { Store } from "./store.js" */

export const MIN_AXIS = 0.2; // seconds that the axis spans while a cell runs
const BLOCK = 512; // spans

/**
 * Update when each block starts and ends, from a span on.
 *
 * @param {Store} store
 * @param {number} from
 */
export function updateBlocks(store, from) {
  const { start, duration: length } = store.columns;
  store.blockStarts.length = store.blockEnds.length = Math.ceil(from / BLOCK);
  for (let i = from; i < store.count; i++) {
    const block = (i / BLOCK) | 0;
    const end = start[i] + length[i];
    if (block === store.blockStarts.length) {
      store.blockStarts.push(start[i]);
      store.blockEnds.push(end);
      continue;
    }
    if (start[i] < store.blockStarts[block]) store.blockStarts[block] = start[i];
    if (end > store.blockEnds[block]) store.blockEnds[block] = end;
  }
}

/**
 * Call a function with the index of each span that may be between two times; blocks without any are skipped.
 *
 * @param {Store} store
 * @param {number} from
 * @param {number} to
 * @param {(i: number) => void} callback
 */
export function forEachBetween(store, from, to, callback) {
  for (let low = store.skip; low < store.count; ) {
    const block = (low / BLOCK) | 0;
    const high = Math.min(store.count, (block + 1) * BLOCK);
    if (store.blockStarts[block] <= to && store.blockEnds[block] >= from) for (let i = low; i < high; i++) callback(i);
    low = high;
  }
}

/**
 * The range from the first start to the last end, or to the present while a cell runs.
 *
 * @param {Store} store
 * @param {number} now
 * @returns {TimeRange}
 */
export function extent(store, now) {
  const { start, duration: length } = store.columns;
  let from = Infinity;
  let to = -Infinity;
  const first = Math.ceil(store.skip / BLOCK); // the block before it is partly left
  for (let i = store.skip; i < Math.min(store.count, first * BLOCK); i++) {
    from = Math.min(from, start[i]);
    to = Math.max(to, start[i] + length[i]);
  }
  for (let block = first; block < store.blockStarts.length; block++) {
    from = Math.min(from, store.blockStarts[block]);
    to = Math.max(to, store.blockEnds[block]);
  }
  if (isRunning(store)) to = Math.max(to, now);
  return from < to ? { from, to } : { from: 0, to: MIN_AXIS };
}

/**
 * Whether a cell is running.
 *
 * @param {Store} store
 */
export function isRunning({ focus }) {
  return focus[0] !== null && focus[1] === null;
}
