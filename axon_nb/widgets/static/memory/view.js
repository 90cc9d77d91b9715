// @ts-check
// The memory panel on a page.

import { makeFigures, makeHead, makeNotice, makeTable } from "../shared/card.js";
import { element, setText } from "../shared/dom.js";
import { sendHeartbeats } from "../shared/wire.js";
import { makeAxis, makeLegend, makeRow, newFlags } from "./bars.js";
import { WhatIf } from "./what_if.js";

/** @import { Figure } from "../shared/card.js" */
/** @import { Context } from "../shared/wire.js" */
/** @import { Row, Tick } from "./bars.js" */

/**
 * The content that the kernel sends.
 *
 * @typedef {object} Content
 * @property {string} context
 * @property {Figure[]} figures
 * @property {[claim: string, text: string] | null} notice
 * @property {string[]} roles
 * @property {string} legend what the bars are
 * @property {Tick[]} ticks
 * @property {string[]} columns of the table
 * @property {string} rest what the column of this name has
 * @property {string} unit of the table
 * @property {Row[]} rows
 * @property {string[]} notes
 * @property {number} updates
 */

/** @param {WhatIf} whatIf */
function buildPage(whatIf) {
  const { head, context } = makeHead("Memory");
  const [figures, notice] = [element("div"), element("div")];
  const legend = element("div", { class: "axon-view-legend" });
  const region = { tabindex: "0", role: "region" };
  const bars = element("div", { class: "axon-memory-scroll", ...region, "aria-label": "memory of each rank" });
  const table = element("div", {
    class: "axon-memory-scroll axon-view-scroll",
    ...region,
    "aria-label": "the same in numbers",
  });
  const notes = element("div", { class: "axon-view-note" });
  const live = element("div", { class: "axon-view-unseen", "aria-live": "polite" });
  const root = element("div", { class: "axon-view axon-memory" }, head, figures, notice, legend, bars, table, notes);
  root.append(live, whatIf.root);
  return { root, context, figures, notice, legend, bars, table, notes, live };
}

/** @param {ReturnType<typeof buildPage>} page @param {Content} data */
function drawPage(page, data) {
  const [top, tableTop] = [page.bars.scrollTop, page.table.scrollTop];
  setText(page.context, data.context);
  page.figures.replaceChildren(...(data.figures.length ? [makeFigures(data.figures)] : []));
  const [claim, text] = data.notice ?? ["", ""];
  page.notice.replaceChildren(...(claim ? [makeNotice({ claim, text })] : []));
  page.legend.replaceChildren(
    ...makeLegend(data.roles),
    element("span", { class: "axon-view-key axon-view-muted" }, data.legend),
  );
  page.bars.replaceChildren(...data.rows.map(makeRow), makeAxis(data.ticks));
  if (top) page.bars.scrollTop = top;
  const columns = [
    { title: data.unit },
    ...data.columns.map((title) => ({ title, isNumber: true, ...(title === "rest" && { hint: data.rest }) })),
  ];
  const rows = data.rows.map(({ rank, cells }) => ({ name: `rank ${rank}`, cells, attributes: { "data-rank": rank } }));
  page.table.replaceChildren(makeTable(columns, rows));
  if (tableTop) page.table.scrollTop = tableTop;
  page.notes.replaceChildren(...data.notes.map((note) => element("div", {}, note)));
  page.root.dataset.updates = String(data.updates);
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
    drawPage(page, data);
    const flags = newFlags(before, data.rows);
    if (flags.length) page.live.textContent = flags.join(" ");
    else if (!data.rows.some((row) => row.flag)) page.live.textContent = "";
    before = data.rows;
  }

  model.on("change:content", draw);
  model.on("change:what_if", whatIf.draw);
  draw();
  whatIf.draw();
  // Plan the current setup once somebody looks; after a reload the prediction already exists.
  if (!whatIf.root.hidden && whatIf.isEmpty) model.send({ op: "what_if", setup: null });
  const stopHeartbeats = sendHeartbeats(model, page.root);
  return () => {
    stopHeartbeats();
    model.off("change:content", draw);
    model.off("change:what_if", whatIf.draw);
  };
}

export default () => ({ render });
