// @ts-check
// The elements of a strip.

import { create } from "../shared/dom.js";
import { rowHeight } from "./layout.js";

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
function buildHead({ title, paints }) {
  const head = part("head");
  const elapsed = create("span", "axon-view-muted axon-strip-elapsed");
  const legend = part("legend", "span");
  const tools = part("tools", "span");
  head.append(create("b", "", { textContent: title }), elapsed, legend, tools);
  for (const [textContent, value, hint] of BUTTONS) {
    tools.append(create("button", "", { type: "button", textContent, value, title: hint, ariaLabel: hint }));
  }
  const swatches = paints.map((paint) => {
    const item = part("key", "span");
    const canvas = create("canvas", "");
    item.append(canvas, paint.label);
    item.hidden = true;
    legend.append(item);
    return { item, canvas };
  });
  return { head, elapsed, tools, swatches };
}

/** @param {Config} config */
function buildGrid({ ranks }) {
  const names = part("names");
  names.setAttribute("aria-hidden", "true");
  const states = part("states");
  states.setAttribute("role", "list");
  const rows = ranks.map((rank) => {
    names.append(create("div", "", { textContent: `rank ${rank}` }));
    const item = create("div", "");
    item.setAttribute("role", "listitem");
    const state = create("span", "");
    item.append(create("span", "axon-view-unseen", { textContent: `rank ${rank}: ` }), state);
    states.append(item);
    return { item, state };
  });
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
  root.style.setProperty("--axon-row", `${rowHeight(config.ranks.length)}px`);
  const { head, ...inHead } = buildHead(config);
  const { grid, ...inGrid } = buildGrid(config);
  const [note, tip, brush, live] = [create("div", "axon-view-muted"), part("tip"), part("brush"), part("unseen")];
  live.setAttribute("aria-live", "polite");
  tip.hidden = brush.hidden = true;
  root.append(head, grid, note, tip, brush, live);
  el.append(root);
  return { root, note, tip, brush, live, ...inHead, ...inGrid };
}
