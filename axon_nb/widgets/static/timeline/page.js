// @ts-check
// The elements of a timeline.

import { drawSwatch } from "../shared/canvas.js";
import { create } from "../shared/dom.js";
import { geometry } from "./layout.js";

/** @import { Config, Facts, Paint } from "./store.js" */

const BUTTONS = [
  ["+", "+", "Zoom in (+)"],
  ["−", "-", "Zoom out (−)"],
  ["cell", "Home", "Show the running cell, or the last one (Home)"],
  ["all", "a", "Show everything (a)"],
  ["save", "save", "Save as a trace for Perfetto"],
];

/**
 * @template {keyof HTMLElementTagNameMap} [Tag="div"]
 * @param {string} name
 * @param {Tag} tag
 * @param {Partial<HTMLElementTagNameMap[Tag]>} properties
 */
export function part(name, tag = /** @type {Tag} */ ("div"), properties = {}) {
  return create(tag, `axon-view-${name} axon-timeline-${name}`, properties);
}

/** @param {string} title */
function buildHead(title) {
  const head = part("head");
  const elapsed = part("muted", "span");
  const tools = part("tools", "span");
  const placeholder = "filter: all_reduce rank:2";
  const filter = create("input", "", { type: "search", placeholder, ariaLabel: "filter spans" });
  tools.append(filter);
  for (const [textContent, value, hint] of BUTTONS) {
    tools.append(create("button", "", { type: "button", textContent, value, title: hint, ariaLabel: hint }));
  }
  head.append(create("b", "", { textContent: title || "Timeline" }), elapsed, tools);
  return { head, elapsed, tools, filter };
}

/** @param {Config} config */
function buildLegend({ paints }) {
  const legend = part("legend", "span");
  const keys = paints.map((paint) => {
    const canvas = create("canvas", "");
    const item = part("key", "button", { type: "button", title: `hide or show: ${paint.label}`, hidden: true });
    item.setAttribute("aria-pressed", "true");
    item.append(canvas, paint.label);
    legend.append(item);
    return { item, canvas };
  });
  return { legend, keys };
}

/**
 * Show the kinds that have been drawn in the legend.
 *
 * @param {ReturnType<typeof buildLegend>["keys"]} keys
 * @param {Paint[]} paints
 * @param {Set<number>} drawn codes of kinds
 * @param {number} ratio device pixels per pixel of the page
 */
export function drawLegend(keys, paints, drawn, ratio) {
  keys.forEach(({ item, canvas }, kind) => {
    if (Number(canvas.dataset.ratio) === ratio || (item.hidden && !drawn.has(kind))) return;
    item.hidden = false;
    canvas.dataset.ratio = String(drawSwatch(canvas, paints[kind]));
  });
}

/** @param {Config} config */
function buildRows({ ranks }) {
  const names = part("names");
  names.setAttribute("aria-hidden", "true");
  for (const rank of ranks) names.append(create("div", "", { textContent: `rank ${rank}` }));
  const canvas = part("canvas", "canvas", { tabIndex: 0 });
  canvas.setAttribute("role", "img");
  const grid = part("grid");
  grid.append(names, canvas);
  const scroll = part("scroll");
  scroll.append(grid);
  return { scroll, canvas };
}

/**
 * @param {Config} config
 * @param {HTMLElement} el
 */
export function build(config, el) {
  const root = create("div", "axon-view axon-timeline");
  root.style.setProperty("--axon-row", `${geometry(config.ranks.length).height}px`);
  const { head, ...inHead } = buildHead(config.title);
  const { legend, keys } = buildLegend(config);
  const { scroll, canvas } = buildRows(config);
  const [steps, facts, note, tip, brush] = ["steps", "facts", "muted", "tip", "brush"].map((name) => part(name));
  const live = part("unseen");
  live.setAttribute("aria-live", "polite");
  tip.hidden = brush.hidden = true;
  root.append(head, legend, scroll, steps, facts, note, tip, brush, live);
  el.append(root);
  return { root, scroll, canvas, keys, steps, facts, note, tip, brush, live, ...inHead };
}

/**
 * Sentences, and a table with a row per rank.
 *
 * @param {Facts} facts
 * @returns {HTMLElement[]}
 */
export function buildFacts({ titles, rows, sentences }) {
  const table = create("table", "");
  /** @type {(texts: (string | number)[], tag: "th" | "td") => HTMLTableRowElement} */
  const line = (texts, tag) => {
    const row = create("tr", "");
    texts.forEach((text, i) => {
      const cell = create(i ? tag : "th", "", { textContent: String(text) });
      if (tag === "th" || !i) cell.scope = tag === "th" ? "col" : "row";
      row.append(cell);
    });
    return row;
  };
  table.append(line(["", ...titles], "th"), ...rows.map(([rank, ...cells]) => line([`rank ${rank}`, ...cells], "td")));
  return [...sentences.map((text) => create("div", "", { textContent: text })), table];
}
