// @ts-check
// Derived from spans: where a backward can only wait, and up to when each rank is known.

/** @import { Config, Store } from "./store.js" */

/** @typedef {{from: number, to: number}} Tail of a backward, in seconds: nothing is left to compute in it */

/** @typedef {{number: number, start: number, end: number, last: number}} Backward last: start of its last communication */

/**
 * `steps`: when the optimizer's steps ended; of several optimizers one after the other, when the last one did.
 *
 * @typedef {{backwards: Backward[], communications: [start: number, end: number][], end: number, steps: number[],
 *   isStepping: boolean}} RankState
 */

const MAX_REMEMBERED = 256; // per rank: a span arrives at most this many spans after the one that contains it
const MAX_TAILS = 150_000;
const MAX_STEPS = 10_000;

export class Derived {
  /** @type {Map<number, Tail>} */
  #tails = new Map();
  /** @type {Map<number, RankState>} */
  #ranks = new Map();
  #next = -1;
  #lastUpdate = -1;

  /** @param {Config} config */
  constructor(config) {
    this.config = config;
  }

  /**
   * Add the spans that have arrived since the last call.
   *
   * @param {Store} store
   */
  update(store) {
    if (store.updates === this.#lastUpdate) return;
    this.#lastUpdate = store.updates;
    if (store.first > this.#next || store.first + store.count < this.#next) {
      this.#tails.clear();
      this.#ranks.clear();
      this.#next = store.first;
    }
    for (let i = this.#next - store.first; i < store.count; i++) this.#add(store, i);
    this.#next = store.first + store.count;
    if (this.#tails.size <= MAX_TAILS) return;
    for (const number of this.#tails.keys()) if (number < store.first) this.#tails.delete(number);
  }

  /**
   * The tail of a backward; undefined: it has none.
   *
   * @param {number} number of the span
   */
  tailOf(number) {
    return this.#tails.get(number);
  }

  /**
   * When the last known span of a rank ends, in seconds; -Infinity: there is none.
   *
   * @param {number} rank
   */
  endOf(rank) {
    return this.#ranks.get(rank)?.end ?? -Infinity;
  }

  /**
   * When the steps of the first rank that has an optimizer ended, in seconds.
   *
   * @returns {number[]}
   */
  get steps() {
    return this.config.ranks.map((rank) => this.#ranks.get(rank)?.steps ?? []).find((steps) => steps.length) ?? [];
  }

  /**
   * @param {Store} store
   * @param {number} i
   */
  #add(store, i) {
    const { start, duration: length, label, rank } = store.columns;
    const none = { backwards: [], communications: [], end: -Infinity, steps: [], isStepping: false };
    const state = this.#ranks.get(rank[i]) ?? none;
    this.#ranks.set(rank[i], state);
    const [from, to] = [start[i], start[i] + length[i]];
    state.end = Math.max(state.end, to);
    const { kind, lane } = this.config.paints[store.labels[label[i]][0]];
    if (kind === "optimizer") {
      if (state.isStepping) state.steps.pop();
      state.steps.push(to);
      if (state.steps.length > MAX_STEPS) state.steps.shift();
    }
    state.isStepping = kind === "optimizer" || (state.isStepping && kind !== "forward" && kind !== "backward");
    if (kind === "backward") {
      const backward = { number: store.first + i, start: from, end: to, last: -Infinity };
      for (const [begin, end] of state.communications) this.#extend(backward, begin, end);
      state.backwards.push(backward);
      if (state.backwards.length > MAX_REMEMBERED) state.backwards.shift();
    } else if (lane === 1) {
      for (const backward of state.backwards) this.#extend(backward, from, to);
      state.communications.push([from, to]);
      if (state.communications.length > MAX_REMEMBERED) state.communications.shift();
    }
  }

  /**
   * Account for a communication.
   *
   * @param {Backward} backward
   * @param {number} start
   * @param {number} end
   */
  #extend(backward, start, end) {
    if (start < backward.start || start >= backward.end || start < backward.last) return;
    backward.last = start;
    this.#tails.set(backward.number, { from: start, to: Math.min(end, backward.end) });
  }
}
