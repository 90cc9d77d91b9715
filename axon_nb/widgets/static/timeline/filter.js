// @ts-check
// Which spans of a timeline are drawn: those whose kind is not switched off, and that have the words of the filter.

/** @import { Config, Store } from "./store.js" */

/**
 * Which spans are drawn: `shown` says it by (label, row).
 *
 * @typedef {{ranks: number[], shown: Uint8Array, config: Config}} Selection
 */

/**
 * Whether each label is shown in each row. Each word of the filter must be found; kinds can be switched off.
 *
 * @param {Store} store
 * @param {number[]} ranks
 * @param {Config} config
 * @param {string} filter
 * @param {Set<string>} off kinds
 */
export function allowed(store, ranks, config, filter, off) {
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  const found = new Uint8Array(store.labels.length * ranks.length);
  store.labels.forEach(([code, name, group], label) => {
    const { kind, label: called } = config.paints[code];
    if (off.has(kind)) return;
    const text =
      `${kind} ${called} ${name} ${group ? `group:${group} ${store.groups[group] ?? ""}` : ""}`.toLowerCase();
    ranks.forEach((rank, row) => {
      const whole = `${text} rank:${rank}`;
      found[label * ranks.length + row] = words.every((word) => whole.includes(word)) ? 1 : 0;
    });
  });
  return found;
}

/** The filter of one page. */
export class SpanFilter {
  /** @type {Set<string>} */
  #off = new Set();
  #shown = new Uint8Array(0);
  #shownFor = "";

  /**
   * @param {Store} store
   * @param {Config} config
   */
  constructor(store, config) {
    this.store = store;
    this.config = config;
  }

  /**
   * Hide or show a kind of spans; returns whether it is shown.
   *
   * @param {string} kind
   */
  toggle(kind) {
    if (this.#off.delete(kind)) return true;
    this.#off.add(kind);
    return false;
  }

  /**
   * Take new words and labels into account.
   *
   * @param {string} words
   */
  update(words) {
    const { labels, groups } = this.store;
    const key = `${labels.length} ${Object.keys(groups).length} ${[...this.#off]} ${words}`;
    if (key === this.#shownFor) return;
    this.#shownFor = key;
    this.#shown = allowed(this.store, this.config.ranks, this.config, words, this.#off);
  }

  /** @returns {Selection} */
  get selection() {
    return { shown: this.#shown, ranks: this.config.ranks, config: this.config };
  }
}
