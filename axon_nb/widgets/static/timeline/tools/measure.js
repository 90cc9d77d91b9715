// @ts-check
// How the ranks spend a stretch of time.

import { pixelShares } from "../layout.js";
import { everyRow } from "../rows.js";

/** @import { TimeRange } from "../../shared/time_axis.js" */
/** @import { Derived } from "../derived.js" */
/** @import { SpanSelection } from "../filter.js" */
/** @import { Store } from "../store.js" */

/** @typedef {{computing: number, own: number, waiting: number, communicating: number}} Spent in seconds, by one rank */

const MAX_COLUMNS = 200_000; // by rank and stretch of time

/**
 * How each rank spends a stretch of time. The first three exclude each other.
 *
 * @param {Store} store
 * @param {SpanSelection & TimeRange & {derived: Derived}} options
 * @returns {Spent[]}
 */
export function timeSpent(store, options) {
  const { from, to, ranks, config } = options;
  const width = Math.max(20, Math.min(1000, Math.floor(MAX_COLUMNS / ranks.length)));
  const { pixels } = pixelShares(store, { ...options, width, rows: everyRow(ranks) });
  const { share, kinds } = pixels;
  const kindAt = config.paints.map((paint) => paint.kind);
  const seconds = (to - from) / width;
  return ranks.map((_, row) => {
    const spent = { computing: 0, own: 0, waiting: 0, communicating: 0 };
    for (let x = 0; x < width; x++) {
      const [code, communication] = [2 * row, 2 * row + 1].map((line) => (line * width + x) * kinds);
      let busy = 0;
      kindAt.forEach((kind, k) => {
        const part = share[code + k] * seconds;
        if (kind === "wait") spent.waiting += part;
        else if (kind === "other") spent.own += part;
        else spent.computing += part;
        busy += share[communication + k];
      });
      spent.communicating += Math.min(1, busy) * seconds;
    }
    return spent;
  });
}

/**
 * The mean of a part over ranks, and the ranks with the least and the most of it, by their place.
 *
 * @param {Spent[]} all
 * @param {keyof Spent} part
 */
export function spreadOf(all, part) {
  let [least, most, sum] = [0, 0, 0];
  all.forEach((spent, i) => {
    sum += spent[part];
    if (spent[part] < all[least][part]) least = i;
    if (spent[part] > all[most][part]) most = i;
  });
  return { mean: sum / all.length, least, most };
}
