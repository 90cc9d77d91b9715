// @ts-check
// The shards panel on a page: a list of drawings, or a treemap by bytes.

import { element, svgElement } from "../shared/dom.js";
import { showTooltip } from "../shared/pointer.js";
import { sendHeartbeats } from "../shared/wire.js";
import { drawMap, drawParts, makeLegend, makePatterns } from "./drawing.js";
import { changedTensors, filterTensors, keyOf } from "./layout.js";

/** @import { Context } from "../shared/wire.js" */
/** @import { ShowTooltip } from "./drawing.js" */
/** @import { Content, Tensor } from "./layout.js" */

/** @typedef {{content: Content | null}} Shared the last content, which all pages' views share */

const MAX_ROWS = 100; // until the button below them is clicked
const COLUMNS = ["tensor", "", "shape", "where", "per rank", "parts by rank"];
let uniqueId = 0;

/** @param {string} prefix of the patterns' identifiers */
function buildPage(prefix) {
  const filter = element("input", {
    type: "search",
    placeholder: "filter by name, kind or axis",
    "aria-label": "filter",
  });
  const list = element("button", { type: "button", class: "axon-view-switch", "aria-pressed": "true" }, "list");
  const map = element("button", { type: "button", class: "axon-view-switch", "aria-pressed": "false" }, "by bytes");
  const heading = element("b", { class: "axon-shards-heading" });
  const state = element("span", { class: "axon-view-muted", "aria-live": "polite" });
  const totals = element("div", { class: "axon-shards-totals" });
  const body = element("div", { class: "axon-shards-body" });
  const notes = element("div", { class: "axon-view-muted" });
  const tip = element("div", { class: "axon-view-tip axon-shards-tip", role: "status", hidden: "" });
  const defs = svgElement("svg", { width: 0, height: 0, "aria-hidden": "true", class: "axon-shards-defs" });
  defs.append(makePatterns(prefix));
  const tools = element("div", { class: "axon-shards-tools" }, filter, list, map, state);
  const root = element("div", { class: "axon-view axon-shards" }, heading, totals, tools, body, notes, tip, defs);
  return { root, filter, list, map, heading, state, totals, body, notes, tip };
}

/** One panel on a page. */
class ShardsView {
  #prefix = `axon-shards-${uniqueId++}`;
  /** @type {"list" | "map"} */
  #kind = "list";
  #filter = "";
  #maxRows = MAX_ROWS;
  #openKey = "";
  /** @type {Set<string>} */
  #changed = new Set();

  /**
   * @param {Context} context
   * @param {Shared} shared
   */
  constructor({ model, el }, shared) {
    this.model = model;
    this.shared = shared;
    this.page = buildPage(this.#prefix);
    el.append(this.page.root);
    this.page.filter.addEventListener("input", () => {
      this.#filter = this.page.filter.value;
      this.#draw();
    });
    for (const kind of /** @type {const} */ (["list", "map"])) {
      this.page[kind].addEventListener("click", () => {
        this.#kind = kind;
        this.#draw();
      });
    }
    model.on("change:content", this.#update);
    const stopHeartbeats = sendHeartbeats(model, this.page.root);
    shared.content ??= this.#content;
    this.#draw();
    this.close = () => {
      stopHeartbeats();
      model.off("change:content", this.#update);
    };
  }

  /** @returns {Content} */
  get #content() {
    return this.model.get("content");
  }

  #update = () => {
    this.#changed = changedTensors(this.shared.content, this.#content);
    this.shared.content = this.#content;
    this.#showTooltip("");
    this.#draw();
  };

  /** @type {ShowTooltip} */
  #showTooltip = (text, event) => {
    const { root, tip } = this.page;
    const frame = root.getBoundingClientRect();
    const [left, top] = event ? [event.clientX - frame.left + 12, event.clientY - frame.top + 16] : [0, 0];
    showTooltip(tip, root, text, left, top);
  };

  #draw() {
    const { page } = this;
    const data = this.#content;
    page.heading.textContent = data.heading;
    page.totals.replaceChildren(
      ...data.totals.map(({ ranks, size, share }) => {
        const bar = element("span", { class: "axon-shards-bar" });
        bar.style.width = `${Math.round(100 * share)}px`;
        return element("span", { class: "axon-shards-total" }, `${ranks} `, bar, ` ${size}`);
      }),
    );
    const tensors = filterTensors(data.tensors, this.#filter);
    page.list.setAttribute("aria-pressed", String(this.#kind === "list"));
    page.map.setAttribute("aria-pressed", String(this.#kind === "map"));
    const changes = this.#changed.size ? ` · ${this.#changed.size} changed in the last update` : "";
    page.state.textContent = `${tensors.length} of ${data.tensors.length} shown${changes}`;
    page.body.replaceChildren(...(this.#kind === "list" ? this.#drawList(data, tensors) : this.#drawMap(tensors)));
    page.notes.replaceChildren(...data.notes.map((note) => element("div", {}, note)));
    page.root.dataset.updates = String(data.updates);
  }

  /** @param {Tensor[]} tensors */
  #drawMap(tensors) {
    const width = Math.max(240, this.page.body.clientWidth || 700);
    return [drawMap(tensors, width, this.#showTooltip), makeLegend(tensors)];
  }

  /**
   * @param {Content} data
   * @param {Tensor[]} tensors
   */
  #drawList(data, tensors) {
    const head = element("tr", {}, ...COLUMNS.map((title) => element("th", { scope: "col" }, title)));
    const rows = tensors.slice(0, this.#maxRows).flatMap((tensor) => this.#drawRow(data, tensor));
    const table = element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows));
    if (tensors.length <= this.#maxRows) return [table];
    const more = element("button", { type: "button" }, `${tensors.length - this.#maxRows} more`);
    more.addEventListener("click", () => {
      this.#maxRows *= 4;
      this.#draw();
    });
    return [table, more];
  }

  /**
   * @param {Content} data
   * @param {Tensor} tensor
   */
  #drawRow(data, tensor) {
    const drawing = data.drawings[tensor.drawing];
    const key = keyOf(tensor);
    const name = element("th", { scope: "row" }, tensor.name);
    const texts = [tensor.role, tensor.shape, tensor.placement, tensor.local];
    const parts = element("td", {}, drawParts(drawing, this.#prefix, this.#showTooltip));
    if (drawing.empty) parts.append(element("div", { class: "axon-view-muted" }, drawing.empty));
    const attributes = { tabindex: "0", "data-name": tensor.name, "data-kind": tensor.kind };
    const line = element("tr", attributes, name, ...texts.map((text) => element("td", {}, text)), parts);
    if (this.#changed.has(key)) line.classList.add("axon-shards-changed");
    const toggle = () => {
      this.#openKey = this.#openKey === key ? "" : key;
      this.#draw();
    };
    line.addEventListener("click", toggle);
    line.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      toggle();
    });
    if (this.#openKey !== key) return [line];
    const details = element("ul", {}, ...drawing.boxes.map((box) => element("li", {}, box.text)));
    if (drawing.empty) details.append(element("li", {}, drawing.empty));
    return [line, element("tr", { class: "axon-shards-details" }, element("td", { colspan: "6" }, details))];
  }
}

export default () => {
  /** @type {Shared} */
  const shared = { content: null };
  return { render: (/** @type {Context} */ context) => new ShardsView(context, shared).close };
};
