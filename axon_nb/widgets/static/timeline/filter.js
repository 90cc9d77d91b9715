// @ts-check
// Which spans of a timeline are drawn: those whose kind is not hidden, and that match all words of the filter.

/** @import { Config, Store } from "./store.js" */

/**
 * Which spans are drawn: `shown` is 1 or 0 by (label, row).
 *
 * @typedef {{ranks: number[], shown: Uint8Array, config: Config}} SpanSelection
 */

/**
 * Whether each label is shown in each row. Each word of the filter must match; kinds can be hidden.
 *
 * @param {Store} store
 * @param {number[]} ranks
 * @param {Config} config
 * @param {string} filter
 * @param {Set<string>} hidden kinds
 */
export function shownLabels(store, ranks, config, filter, hidden) {
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  const shown = new Uint8Array(store.labels.length * ranks.length);
  store.labels.forEach(([code, name, group], label) => {
    const { kind, label: kindName } = config.paints[code];
    if (hidden.has(kind)) return;
    const text =
      `${kind} ${kindName} ${name} ${group ? `group:${group} ${store.groups[group] ?? ""}` : ""}`.toLowerCase();
    ranks.forEach((rank, row) => {
      const rankText = `${text} rank:${rank}`;
      shown[label * ranks.length + row] = words.every((word) => rankText.includes(word)) ? 1 : 0;
    });
  });
  return shown;
}

/** The filter of one page. */
export class SpanFilter {
  /** @type {Set<string>} */
  #hidden = new Set();
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
    if (this.#hidden.delete(kind)) return true;
    this.#hidden.add(kind);
    return false;
  }

  /**
   * Apply the filter to new labels, or a new filter to all.
   *
   * @param {string} filter
   */
  update(filter) {
    const { labels, groups } = this.store;
    const key = `${labels.length} ${Object.keys(groups).length} ${[...this.#hidden]} ${filter}`;
    if (key === this.#shownFor) return;
    this.#shownFor = key;
    this.#shown = shownLabels(this.store, this.config.ranks, this.config, filter, this.#hidden);
  }

  /** @returns {SpanSelection} */
  get selection() {
    return { shown: this.#shown, ranks: this.config.ranks, config: this.config };
  }
}
