// @ts-check
// Which spans of a timeline are drawn: those whose kind is not hidden, and that match all words of the filter.

/** @import { Config, Store } from "./store.js" */

/**
 * Which spans are drawn: `shown` is 1 or 0 by (label, row), `ownCode` by row; `hidesWaits`: no waiting is drawn.
 *
 * @typedef {{ranks: number[], shown: Uint8Array, ownCode: Uint8Array, hidesWaits: boolean, config: Config}} SpanSelection
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
  const words = wordsOf(filter);
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

/**
 * Whether the own code of each rank is shown.
 *
 * @param {number[]} ranks
 * @param {Config} config
 * @param {string} filter
 * @param {Set<string>} hidden kinds
 */
export function shownOwnCode(ranks, config, filter, hidden) {
  const words = wordsOf(filter);
  const label = config.paints.find((paint) => paint.kind === "other")?.label ?? "";
  const texts = ranks.map((rank) => `other ${label} rank:${rank}`);
  return Uint8Array.from(texts, (text) => Number(!hidden.has("other") && words.every((word) => text.includes(word))));
}

/** @param {string} filter */
function wordsOf(filter) {
  return filter.toLowerCase().split(/\s+/).filter(Boolean);
}

/** The filter of one page. */
export class SpanFilter {
  /** @type {Set<string>} */
  #hidden = new Set();
  #shown = new Uint8Array(0);
  #ownCode = new Uint8Array(0);
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
    const { ranks } = this.config;
    this.#shown = shownLabels(this.store, ranks, this.config, filter, this.#hidden);
    this.#ownCode = shownOwnCode(ranks, this.config, filter, this.#hidden);
  }

  /** @returns {SpanSelection} */
  get selection() {
    const { ranks } = this.config;
    const hidesWaits = this.#hidden.has("wait");
    return { shown: this.#shown, ownCode: this.#ownCode, hidesWaits, ranks, config: this.config };
  }
}
