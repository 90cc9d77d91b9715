// @ts-check
// The shards panel on a page: a list of drawings, or a treemap by bytes.

import { element, svgElement } from "../shared/dom.js";
import { sendHeartbeats } from "../shared/wire.js";
import { drawMap, drawParts, makeLegend, makePatterns } from "./drawing.js";
import { changed, keyOf, matching } from "./layout.js";

/** @import { Context } from "../shared/wire.js" */
/** @import { Show } from "./drawing.js" */
/** @import { Content, Tensor } from "./layout.js" */

/** @typedef {{content: Content | null}} Shared what all pages' views share: what was drawn before */

const ROWS = 100;
const COLUMNS = ["tensor", "", "shape", "where", "on a rank", "parts by rank"];
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
  #rows = ROWS;
  #open = "";
  /** @type {Set<string>} */
  #fresh = new Set();

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
    this.#fresh = changed(this.shared.content, this.#content);
    this.shared.content = this.#content;
    this.#show("");
    this.#draw();
  };

  /** @type {Show} */
  #show = (words, event) => {
    const { root, tip } = this.page;
    tip.hidden = !words;
    tip.textContent = words;
    if (!words || !event) return;
    const frame = root.getBoundingClientRect();
    tip.style.left = `${Math.max(0, Math.min(event.clientX - frame.left + 12, frame.width - tip.offsetWidth))}px`;
    tip.style.top = `${event.clientY - frame.top + 16}px`;
  };

  #draw() {
    const { page } = this;
    const data = this.#content;
    page.heading.textContent = data.heading;
    page.totals.replaceChildren(
      ...data.totals.map(({ ranks, size, part }) => {
        const bar = element("span", { class: "axon-shards-bar" });
        bar.style.width = `${Math.round(100 * part)}px`;
        return element("span", { class: "axon-shards-total" }, `${ranks} `, bar, ` ${size}`);
      }),
    );
    const tensors = matching(data.tensors, this.#filter);
    page.list.setAttribute("aria-pressed", String(this.#kind === "list"));
    page.map.setAttribute("aria-pressed", String(this.#kind === "map"));
    const changes = this.#fresh.size ? ` · ${this.#fresh.size} changed in the last update` : "";
    page.state.textContent = `${tensors.length} of ${data.tensors.length} shown${changes}`;
    page.body.replaceChildren(...(this.#kind === "list" ? this.#drawList(data, tensors) : this.#drawMap(tensors)));
    page.notes.replaceChildren(...data.notes.map((note) => element("div", {}, note)));
    page.root.dataset.updates = String(data.updates);
  }

  /** @param {Tensor[]} tensors */
  #drawMap(tensors) {
    const width = Math.max(240, this.page.body.clientWidth || 700);
    return [drawMap(tensors, width, this.#show), makeLegend(tensors)];
  }

  /**
   * @param {Content} data
   * @param {Tensor[]} tensors
   */
  #drawList(data, tensors) {
    const head = element("tr", {}, ...COLUMNS.map((title) => element("th", { scope: "col" }, title)));
    const rows = tensors.slice(0, this.#rows).flatMap((tensor) => this.#drawRow(data, tensor));
    const table = element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows));
    if (tensors.length <= this.#rows) return [table];
    const more = element("button", { type: "button" }, `${tensors.length - this.#rows} more`);
    more.addEventListener("click", () => {
      this.#rows *= 4;
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
    const texts = [tensor.role, tensor.shape, tensor.where, tensor.each];
    const drawn = element("td", {}, drawParts(drawing, this.#prefix, this.#show));
    if (drawing.empty) drawn.append(element("div", { class: "axon-view-muted" }, drawing.empty));
    const attributes = { tabindex: "0", "data-name": tensor.name, "data-kind": tensor.kind };
    const line = element("tr", attributes, name, ...texts.map((text) => element("td", {}, text)), drawn);
    if (this.#fresh.has(key)) line.classList.add("axon-shards-fresh");
    const toggle = () => {
      this.#open = this.#open === key ? "" : key;
      this.#draw();
    };
    line.addEventListener("click", toggle);
    line.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      toggle();
    });
    if (this.#open !== key) return [line];
    const parts = element("ul", {}, ...drawing.boxes.map((box) => element("li", {}, box.words)));
    if (drawing.empty) parts.append(element("li", {}, drawing.empty));
    return [line, element("tr", { class: "axon-shards-details" }, element("td", { colspan: "6" }, parts))];
  }
}

export default () => {
  /** @type {Shared} */
  const shared = { content: null };
  return { render: (/** @type {Context} */ context) => new ShardsView(context, shared).close };
};
