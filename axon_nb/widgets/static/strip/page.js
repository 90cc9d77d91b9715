// @ts-check
// The elements of a strip.

import { makeHead, makeSwatch } from "../shared/card.js";
import { create } from "../shared/dom.js";
import { rowHeight, rowsPerLabel } from "./layout.js";

/** @import { Config } from "./store.js" */

const BUTTONS = [
  ["+", "+", "Zoom in (+)"],
  ["−", "-", "Zoom out (-)"],
  ["all", "Home", "Show everything (Home)"],
];

/**
 * @template {keyof HTMLElementTagNameMap} [Tag="div"]
 * @param {string} name
 * @param {Tag} tag
 */
function part(name, tag = /** @type {Tag} */ ("div")) {
  return create(tag, `axon-view-${name} axon-strip-${name}`);
}

/** @param {Config} config */
function buildHead({ title, ranks, paints }) {
  const { head, state, context, tools } = makeHead("Activity");
  const count = `${ranks.length} rank${ranks.length === 1 ? "" : "s"}`;
  const elapsed = create("span", "axon-strip-elapsed");
  context.append(title ? `${title} · ${count} · ` : `${count} · `, elapsed);
  for (const [textContent, value, hint] of BUTTONS) {
    tools.append(create("button", "", { type: "button", textContent, value, title: hint, ariaLabel: hint }));
  }
  const legend = part("legend");
  const keys = paints.map((paint) => {
    const item = part("key", "span");
    item.append(makeSwatch(paint.token, paint.form), paint.label);
    item.hidden = true;
    legend.append(item);
    return item;
  });
  return { head, legend, state, elapsed, tools, keys };
}

/** @param {Config} config */
function buildGrid({ ranks }) {
  const names = part("names");
  names.setAttribute("aria-hidden", "true");
  const states = part("states");
  states.setAttribute("role", "list");
  /** @type {{item: HTMLElement, state: HTMLElement, first: number, last: number}[]} */
  const rows = [];
  const perLabel = rowsPerLabel(ranks.length);
  for (let first = 0; first < ranks.length; first += perLabel) {
    const last = Math.min(first + perLabel, ranks.length) - 1;
    const name = first === last ? `rank ${ranks[first]}` : `ranks ${ranks[first]}…${ranks[last]}`;
    names.append(create("div", "", { textContent: name }));
    const item = create("div", "");
    item.setAttribute("role", "listitem");
    const state = create("span", "");
    item.append(create("span", "axon-view-unseen", { textContent: `${name}: ` }), state);
    states.append(item);
    rows.push({ item, state, first, last });
  }
  const canvas = create("canvas", "axon-strip-canvas", { tabIndex: 0 });
  canvas.setAttribute("role", "img");
  const grid = part("grid");
  grid.append(names, canvas, states);
  return { grid, canvas, rows };
}

/**
 * @param {Config} config
 * @param {HTMLElement} el
 */
export function build(config, el) {
  const root = create("div", "axon-view axon-strip");
  const labelHeight = rowHeight(config.ranks.length) * rowsPerLabel(config.ranks.length);
  root.style.setProperty("--axon-row", `${labelHeight}px`);
  const { head, legend, ...inHead } = buildHead(config);
  const { grid, ...inGrid } = buildGrid(config);
  const [note, tip, brush, live] = ["note", "tip", "brush", "unseen"].map((name) => part(name));
  live.setAttribute("aria-live", "polite");
  tip.hidden = brush.hidden = true;
  root.append(head, legend, grid, note, tip, brush, live);
  el.append(root);
  return { root, note, tip, brush, live, ...inHead, ...inGrid };
}
