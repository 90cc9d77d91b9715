// @ts-check
// What the keyboard has chosen in a timeline: a lane, and maybe a span in it.

import { neighbour } from "./layout.js";

/** @import { Stretch } from "../shared/time_axis.js" */
/** @import { Selection } from "./filter.js" */
/** @import { Store } from "./store.js" */

/** @typedef {{row: number, lane: number, index: number}} Mark a lane, and a span in it by its index; -1: the lane */

export class Cursor {
  /** @type {{row: number, lane: number, number: number} | null} */
  #at = null; // by the number of the span, as indices change when old spans are removed

  /**
   * @param {Store} store
   * @param {number[]} ranks
   */
  constructor(store, ranks) {
    this.store = store;
    this.ranks = ranks;
  }

  /** @returns {Mark | null} */
  get mark() {
    if (!this.#at) return null;
    const { first, skip, count } = this.store;
    const { row, lane, number } = this.#at;
    const index = number < 0 ? -1 : number - first;
    return { row, lane, index: index >= skip && index < count ? index : -1 };
  }

  clear() {
    this.#at = null;
  }

  /**
   * Choose the next lane (`way` 1) or the one before (-1); returns it in words.
   *
   * @param {number} way
   */
  moveLane(way) {
    const line = this.#at ? this.#at.row * 2 + this.#at.lane + way : 0;
    const next = Math.min(Math.max(0, line), 2 * this.ranks.length - 1);
    const [row, lane] = [next >> 1, next % 2];
    this.#at = { row, lane, number: -1 };
    return `rank ${this.ranks[row]}, ${lane ? "communication" : "its code"}`;
  }

  /**
   * Choose the next span in the lane (`way` 1) or the one before (-1), at first one in sight; null: there is none.
   *
   * @param {number} way
   * @param {Stretch} stretch
   * @param {Selection} selection
   * @returns {Mark | null}
   */
  moveSpan(way, { from, to }, selection) {
    const { start } = this.store.columns;
    const { row, lane, index } = this.mark ?? { row: 0, lane: 0, index: -1 };
    const time = index >= 0 ? start[index] : way > 0 ? from - 1e-9 : to;
    const place = { ...selection, rank: this.ranks[row], row, lane, time };
    let next = neighbour(this.store, { ...place, way });
    if (next < 0 && index < 0) next = neighbour(this.store, { ...place, way: -way });
    if (next < 0) return null;
    this.#at = { row, lane, number: this.store.first + next };
    return this.mark;
  }
}
