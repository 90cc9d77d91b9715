// @ts-check
// What is pinned below a timeline: a span with its calls on all ranks, or one or two stretches of time.

import { makePairs, makeTable } from "../../shared/card.js";
import { element } from "../../shared/dom.js";
import { formatDuration } from "../../shared/format.js";
import { familyOf } from "./family.js";
import { spreadOf, timeSpent } from "./measure.js";
import { spanFacts } from "./text.js";

/** @import { TimeRange } from "../../shared/time_axis.js" */
/** @import { Derived } from "../derived.js" */
/** @import { SpanSelection } from "../filter.js" */
/** @import { Spent } from "./measure.js" */
/** @import { Config, Store } from "../store.js" */

/**
 * What the details need of their timeline.
 *
 * @typedef {object} DetailsView
 * @property {Store} store
 * @property {Config} config
 * @property {Derived} derived
 * @property {() => number} zero the time labelled 0, in seconds
 * @property {() => SpanSelection} selection which spans are drawn
 * @property {(range: TimeRange) => void} zoomTo
 * @property {() => void} unpin
 */

const MAX_CALLS = 16;
/** @type {[keyof Spent, string, string][]} */
const PARTS = [
  ["computing", "computing", "kind-forward"],
  ["own", "own code", "kind-other"],
  ["waiting", "waiting", "kind-wait"],
  ["communicating", "communicating", "kind-collective"],
];

/** The panel below a timeline. */
export class Details {
  /**
   * @param {HTMLElement} root
   * @param {DetailsView} view
   */
  constructor(root, view) {
    this.root = root;
    this.view = view;
  }

  close() {
    this.root.replaceChildren();
  }

  /**
   * Show a span, and its calls on all ranks.
   *
   * @param {number} index
   */
  showSpan(index) {
    const { store, config, derived } = this.view;
    const { title, pairs } = spanFacts(store, index, config, this.view.zero(), derived.tailOf(store.first + index));
    const [, list] = makePairs(title, pairs);
    const family = familyOf(store, index, derived.steps);
    this.#show([element("b", {}, title)], [list, ...(family.length ? [this.#calls(family, index)] : [])]);
  }

  /**
   * Show how the ranks spend a stretch of time, or what differs between two.
   *
   * @param {TimeRange[]} ranges
   */
  showRanges(ranges) {
    const [first, second] = ranges;
    const length = (/** @type {TimeRange} */ { from, to }) => formatDuration(to - from);
    const zoom = element("button", { type: "button" }, "zoom in");
    zoom.addEventListener("click", () => this.view.zoomTo(ranges[ranges.length - 1]));
    const title = second ? `${length(first)} beside ${length(second)}` : length(first);
    const hint = second ? "" : "Shift and drag compares it with another stretch.";
    this.#show(
      [element("b", {}, title), zoom, element("span", { class: "axon-view-muted" }, hint)],
      [second ? this.#comparison(first, second) : this.#spread(first)],
    );
  }

  /**
   * @param {Node[]} head
   * @param {Node[]} body
   */
  #show(head, body) {
    const close = element("button", { type: "button", class: "axon-view-plain", "aria-label": "close" }, "×");
    close.addEventListener("click", () => this.view.unpin());
    const words = element("div", { class: "axon-timeline-details-head" }, ...head, close);
    this.root.replaceChildren(words, element("div", { class: "axon-timeline-details-body" }, ...body));
  }

  /**
   * When each rank came to a collective, or a microbatch to each stage; of many, the last to come.
   *
   * @param {number[]} family
   * @param {number} index
   */
  #calls(family, index) {
    const { start, duration: length, late, rank, by, microbatch } = this.view.store.columns;
    const from = Math.min(...family.map((i) => start[i]));
    const to = Math.max(...family.map((i) => start[i] + length[i]));
    const isCollective = microbatch[index] < 0;
    const calls = isCollective ? this.#onePerRank(family) : family;
    const latest = [...calls].sort((a, b) => start[b] - start[a]).slice(0, MAX_CALLS);
    const place = (/** @type {number} */ time) => `${((100 * (time - from)) / (to - from || 1)).toFixed(2)}%`;
    const rows = latest
      .sort((a, b) => (isCollective ? rank[a] - rank[b] : start[a] - start[b]))
      .map((i) => {
        const bar = element("span", { class: "axon-timeline-call", "aria-hidden": "true" });
        const ready = start[i] + (isCollective ? Math.min(late[i], length[i]) : 0);
        const [code] = this.view.store.labels[this.view.store.columns.label[i]];
        for (const [token, a, b] of [
          ["kind-wait", start[i], ready],
          [this.view.config.paints[code].token, ready, start[i] + length[i]],
        ]) {
          const part = element("i");
          part.style.setProperty("--paint", `var(--axon-${token})`);
          part.style.left = place(Number(a));
          part.style.right = `calc(100% - ${place(Number(b))})`;
          bar.append(part);
        }
        const isLast = isCollective && by[i] === rank[i];
        const took = late[i] > 0 && !isLast ? `waited ${formatDuration(late[i])}` : `took ${formatDuration(length[i])}`;
        const words = element("span", isLast ? { class: "axon-view-flagged" } : {}, isLast ? "came last" : took);
        return element("li", {}, element("span", {}, `rank ${rank[i]}`), bar, words);
      });
    const omitted = calls.length - latest.length;
    const more = omitted ? [element("li", { class: "axon-view-muted" }, `${omitted} that came earlier`)] : [];
    return element("ul", { class: "axon-timeline-calls" }, ...rows, ...more);
  }

  /**
   * The call of each rank: not the span of its code that waits for it, which has the same name.
   *
   * @param {number[]} family
   */
  #onePerRank(family) {
    const { store, config } = this.view;
    const { rank, label } = store.columns;
    const laneOf = (/** @type {number} */ i) => config.paints[store.labels[label[i]][0]].lane;
    return [...new Map([...family].sort((a, b) => laneOf(a) - laneOf(b)).map((i) => [rank[i], i])).values()];
  }

  /** @param {TimeRange} range */
  #timeSpent(range) {
    const { store, derived, selection } = this.view;
    return timeSpent(store, { ...selection(), ...range, derived });
  }

  /** @param {TimeRange} range */
  #spread(range) {
    const all = this.#timeSpent(range);
    const { ranks } = this.view.config;
    const length = range.to - range.from;
    const columns = ["time spent", "mean", "least", "most"].map((title, i) => ({ title, isNumber: i > 0 }));
    const rows = PARTS.map(([part, name, token]) => {
      const { mean, least, most } = spreadOf(all, part);
      const text = (/** @type {number} */ at) => `${formatDuration(all[at][part])} · rank ${ranks[at]}`;
      const share = mean / length;
      return { name, cells: [{ text: formatDuration(mean), share, token }, text(least), text(most)] };
    });
    return makeTable(columns, rows);
  }

  /**
   * @param {TimeRange} first
   * @param {TimeRange} second
   */
  #comparison(first, second) {
    const [before, after] = [first, second].map((range) => this.#timeSpent(range));
    const longest = Math.max(first.to - first.from, second.to - second.from);
    const columns = ["mean of the ranks", "first", "second", "change"].map((title, i) => ({ title, isNumber: i > 0 }));
    const rows = PARTS.map(([part, name, token]) => {
      const [a, b] = [spreadOf(before, part).mean, spreadOf(after, part).mean];
      const sign = b < a ? "−" : "+";
      const cells = [a, b].map((mean) => ({ text: formatDuration(mean), share: mean / longest, token }));
      return { name, cells: [...cells, { text: `${sign}${formatDuration(Math.abs(b - a))}` }] };
    });
    return makeTable(columns, rows);
  }
}
