// @ts-check
// The keyboard's selection in a timeline: a lane, and maybe a span in it.

import { nextSpan } from "./search.js";

/** @import { TimeRange } from "../../shared/time_axis.js" */
/** @import { SpanSelection } from "../filter.js" */
/** @import { Rows } from "../rows.js" */
/** @import { Store } from "../store.js" */

/** @typedef {{row: number, lane: number, index: number}} Mark a lane, and a span in it by its index; -1: the lane */

export class Cursor {
  /** @type {{row: number, lane: number, number: number} | null} */
  #current = null; // with the number of the span, as indices change when old spans are removed

  /**
   * @param {Store} store
   * @param {() => Rows} rows
   */
  constructor(store, rows) {
    this.store = store;
    this.rows = rows;
  }

  /** @returns {Mark | null} */
  get mark() {
    if (!this.#current) return null;
    const { first, skip, count } = this.store;
    const { row, lane, number } = this.#current;
    const index = number < 0 ? -1 : number - first;
    return { row, lane, index: index >= skip && index < count ? index : -1 };
  }

  /**
   * Select a span.
   *
   * @param {number} row
   * @param {number} lane
   * @param {number} index
   */
  select(row, lane, index) {
    this.#current = { row, lane, number: this.store.first + index };
  }

  clear() {
    this.#current = null;
  }

  /**
   * Select the next lane (`direction` 1) or the previous one (-1); returns its name.
   *
   * @param {number} direction
   */
  moveLane(direction) {
    const line = this.#current ? this.#current.row * 2 + this.#current.lane + direction : 0;
    const { list } = this.rows();
    const next = Math.min(Math.max(0, line), 2 * list.length - 1);
    const [row, lane] = [next >> 1, next % 2];
    this.#current = { row, lane, number: -1 };
    const name = list[row].ranks.length > 1 ? `ranks ${list[row].name}` : list[row].name;
    return `${name}, ${lane ? "communication" : "code"}`;
  }

  /**
   * Select the next span in the lane (`direction` 1) or the previous one (-1), at first a visible one; null: none.
   *
   * @param {number} direction
   * @param {TimeRange} range
   * @param {SpanSelection} selection
   * @returns {Mark | null}
   */
  moveSpan(direction, { from, to }, selection) {
    const { start } = this.store.columns;
    const { row, lane, index } = this.mark ?? { row: 0, lane: 0, index: -1 };
    const time = index >= 0 ? start[index] : direction > 0 ? from - 1e-9 : to;
    const options = { ...selection, rows: this.rows(), row, lane, time };
    let next = nextSpan(this.store, { ...options, direction });
    if (next < 0 && index < 0) next = nextSpan(this.store, { ...options, direction: -direction });
    if (next < 0) return null;
    this.#current = { row, lane, number: this.store.first + next };
    return this.mark;
  }
}
