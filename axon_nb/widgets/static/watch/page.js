// @ts-check
// The elements of a watched job.

import { makeHead, makeSegments } from "../shared/card.js";
import { element } from "../shared/dom.js";

/**
 * A loop, with the progress of the slowest and the fastest rank, from 0 to 1.
 *
 * @typedef {object} Bar
 * @property {string} desc
 * @property {number} low
 * @property {number} high
 * @property {string} text everything, as a sentence
 * @property {string} count such as `412/640`
 * @property {string} rate
 * @property {string} left time left, or how it ended
 * @property {string} behind which rank is behind; empty: none
 * @property {boolean} is_over
 */

/** @param {Bar} bar */
export function makeBar({ desc, low, high, text, count, rate, left, behind, is_over: isOver }) {
  /** @type {(share: number, name: string) => HTMLElement} */
  const part = (share, name) => {
    const filled = element("i", { class: `axon-watch-${name}` });
    filled.style.width = `${(100 * share).toFixed(1)}%`;
    return filled;
  };
  const name = desc || "progress";
  const range = { "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": Math.round(100 * low) };
  const label = { "aria-label": `${name}: ${text}`, title: text };
  const track = element("div", { class: "axon-watch-track", role: "progressbar", ...range, ...label });
  track.append(part(high, "fastest"), part(low, "slowest"));
  const facts = element("span", { class: "axon-watch-facts" }, ...[rate, left].filter(Boolean).map(spanOf));
  if (behind) facts.append(element("span", { class: "axon-view-flagged" }, behind));
  const texts = [element("span", {}, name), element("b", {}, count)];
  const row = element("div", { class: "axon-watch-bar" }, ...texts, track, facts);
  if (isOver) row.classList.add("axon-view-muted");
  return row;
}

/** @param {string} text */
function spanOf(text) {
  return element("span", {}, text);
}

const WEIGHTS = /** @type {["0" | "0.6" | "0.9", string][]} */ ([
  ["0", "raw"],
  ["0.6", "0.6"],
  ["0.9", "0.9"],
]);

/** @param {(weight: number) => void} onWeight called if another smoothing is chosen */
export function buildPage(onWeight) {
  const { head, state, context, tools } = makeHead("Watch");
  context.classList.add("axon-watch-heading");
  const smooth = makeSegments("smoothing of logged curves", WEIGHTS, "0", (weight) => onWeight(Number(weight)));
  const logarithm = element("button", { type: "button", "aria-pressed": "false" }, "log scale");
  const title = "Interrupt the cell on all ranks, as Jupyter's stop button does";
  const stop = element("button", { type: "button", class: "axon-watch-stop axon-view-danger", title });
  tools.append(element("span", { class: "axon-view-muted" }, "smoothing"), smooth, logarithm, stop);
  const bars = element("div", { class: "axon-watch-bars" });
  const groups = {
    steps: element("div", { class: "axon-watch-charts", role: "group", "aria-label": "logged, by step" }),
    seconds: element("div", { class: "axon-watch-charts", role: "group", "aria-label": "measured, by time" }),
  };
  const hint = element("code", {}, "axon_nb.log(loss=loss)");
  const empty = element("div", { class: "axon-view-empty" }, "Nothing logged yet: call ", hint, " in the loop.");
  const ranks = element("div", { class: "axon-watch-ranks axon-view-scroll" });
  ranks.tabIndex = 0;
  ranks.setAttribute("role", "region");
  ranks.setAttribute("aria-label", "ranks");
  const notes = element("div", { class: "axon-view-note" });
  const tip = element("div", { class: "axon-view-tip", hidden: "" });
  const live = element("div", { class: "axon-view-unseen", "aria-live": "polite" });
  const root = element("div", { class: "axon-view axon-watch" }, head, bars, groups.steps, groups.seconds, empty);
  root.append(ranks, notes, tip, live);
  return { root, state, heading: context, logarithm, stop, bars, groups, empty, ranks, notes, tip, live };
}
