// @ts-check
// The memory panel on a page.

import { element } from "../shared/dom.js";
import { sendHeartbeats } from "../shared/wire.js";
import { makeLegend, makeRow, newFlags } from "./bars.js";
import { WhatIf } from "./what_if.js";

/** @import { Context } from "../shared/wire.js" */
/** @import { Row } from "./bars.js" */

/**
 * The content that the kernel sends.
 *
 * @typedef {object} Content
 * @property {string} heading
 * @property {string[]} roles
 * @property {string[]} titles of the columns
 * @property {Row[]} rows
 * @property {string[]} notes
 * @property {number} updates
 */

/** @param {WhatIf} whatIf */
function buildPage(whatIf) {
  const heading = element("b", { class: "axon-memory-heading" });
  const legend = element("div", { class: "axon-memory-legend" });
  const scroll = element("div", { class: "axon-memory-scroll", tabindex: "0", role: "region", "aria-label": "memory" });
  const notes = element("div", { class: "axon-view-muted" });
  const live = element("div", { class: "axon-view-muted", "aria-live": "polite" });
  const root = element("div", { class: "axon-view axon-memory" }, heading, legend, scroll, live, notes, whatIf.root);
  return { root, heading, legend, scroll, notes, live };
}

/** @param {Context} context */
function render({ model, el }) {
  const whatIf = new WhatIf(model);
  const page = buildPage(whatIf);
  /** @type {Row[]} */
  let before = [];
  el.append(page.root);

  function draw() {
    /** @type {Content} */
    const data = model.get("content");
    page.heading.textContent = data.heading;
    const marks = element("span", { class: "axon-view-muted" }, "| highest", " ┊ capacity");
    page.legend.replaceChildren(...makeLegend(data.roles), marks);
    const head = element("tr", {}, ...data.titles.map((title) => element("th", { scope: "col" }, title)));
    const top = page.scroll.scrollTop;
    const table = element("table", {}, element("thead", {}, head), element("tbody", {}, ...data.rows.map(makeRow)));
    page.scroll.replaceChildren(table);
    page.scroll.scrollTop = top;
    const flags = newFlags(before, data.rows);
    if (flags.length) page.live.textContent = flags.join(" ");
    else if (!data.rows.some((row) => row.flag)) page.live.textContent = "";
    before = data.rows;
    page.notes.replaceChildren(...data.notes.map((note) => element("div", {}, note)));
    page.root.dataset.updates = String(data.updates);
  }

  model.on("change:content", draw);
  model.on("change:what_if", whatIf.draw);
  draw();
  whatIf.draw();
  // Plan the current setup once somebody looks; after a reload the prediction is there already.
  if (!whatIf.root.hidden && whatIf.isEmpty) model.send({ op: "what_if", setup: null });
  const stopHeartbeats = sendHeartbeats(model, page.root);
  return () => {
    stopHeartbeats();
    model.off("change:content", draw);
    model.off("change:what_if", whatIf.draw);
  };
}

export default () => ({ render });
