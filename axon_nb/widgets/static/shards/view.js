// @ts-check
// The shards panel on a page: a list of drawings, or a treemap by bytes.

import { makeHead, makeSegments } from "../shared/card.js";
import { element, setText } from "../shared/dom.js";
import { showTooltip } from "../shared/pointer.js";
import { onAppearanceChange, readTheme } from "../shared/theme.js";
import { sendHeartbeats } from "../shared/wire.js";
import { drawMap, drawParts, makeLegend } from "./drawing.js";
import { changedTensors, filterTensors, foldTensors, keyOf } from "./layout.js";
import { makeMesh, showPartsOf } from "./mesh.js";

/** @import { Context } from "../shared/wire.js" */
/** @import { ShowTooltip } from "./drawing.js" */
/** @import { Alike, Content, Tensor } from "./layout.js" */

/** @typedef {{content: Content | null}} Shared the last content, which all pages' views share */

const MAX_ROWS = 100; // until the button below them is clicked
const MAP_MARGIN = 16; // pixels
const COLUMNS = ["tensor", "role", "shape", "where", "per rank", "parts by rank"];

/** @param {(kind: "list" | "map") => void} onKind called if another kind of drawing is chosen */
function buildPage(onKind) {
  const { head, context: heading, tools } = makeHead("Shards");
  heading.classList.add("axon-shards-heading");
  const placeholder = "filter: name, role, axis";
  const filter = element("input", { type: "search", class: "axon-view-search", placeholder, "aria-label": "filter" });
  const kinds = /** @type {["list" | "map", string][]} */ ([
    ["list", "list"],
    ["map", "by bytes"],
  ]);
  const segments = makeSegments("drawing", kinds, "list", onKind);
  tools.append(filter, segments);
  const state = element("div", { class: "axon-view-muted axon-shards-state", "aria-live": "polite" });
  const totals = element("div", { class: "axon-shards-totals" });
  const region = { tabindex: "0", role: "region", "aria-label": "tensors" };
  const body = element("div", { class: "axon-shards-body", ...region });
  const notes = element("div", { class: "axon-view-note" });
  const tip = element("div", { class: "axon-view-tip axon-shards-tip", role: "status", hidden: "" });
  const mesh = element("div");
  const root = element("div", { class: "axon-view axon-shards" }, head, totals, mesh, state, body, notes, tip);
  return { root, filter, heading, state, totals, mesh, body, notes, tip };
}

/** One panel on a page. */
class ShardsView {
  /** @type {"list" | "map"} */
  #kind = "list";
  #filter = "";
  #maxRows = MAX_ROWS;
  #openKey = "";
  /** @type {Set<string>} */
  #unfolded = new Set();
  #rank = -1;
  /** @type {Set<string>} */
  #changed = new Set();

  /**
   * @param {Context} context
   * @param {Shared} shared
   */
  constructor({ model, el }, shared) {
    this.model = model;
    this.shared = shared;
    this.page = buildPage((kind) => {
      this.#kind = kind;
      this.#draw();
    });
    el.append(this.page.root);
    this.theme = readTheme(this.page.root);
    this.page.filter.addEventListener("input", () => {
      this.#filter = this.page.filter.value;
      this.#draw();
    });
    model.on("change:content", this.#update);
    const stopHeartbeats = sendHeartbeats(model, this.page.root);
    let width = 0;
    const stopObserving = onAppearanceChange(this.page.root, () => {
      const before = this.theme.of("tone");
      this.theme = readTheme(this.page.root);
      const isThemed = this.theme.of("tone") !== before;
      const isResized = width !== this.page.root.clientWidth;
      width = this.page.root.clientWidth;
      if (isThemed || (isResized && this.#kind === "map")) this.#draw();
    });
    shared.content ??= this.#content;
    this.#draw();
    this.close = () => {
      stopHeartbeats();
      stopObserving();
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
    setText(page.heading, data.heading);
    page.totals.replaceChildren(
      ...data.totals.map(({ ranks, size, share }) => {
        const bar = element("span", { class: "axon-shards-bar" });
        bar.style.width = `${Math.round(100 * share)}px`;
        return element("span", { class: "axon-shards-total" }, `${ranks} `, bar, ` ${size}`);
      }),
    );
    const tensors = filterTensors(data.tensors, this.#filter);
    const changes = this.#changed.size ? ` · ${this.#changed.size} changed in the last update` : "";
    const cell = data.mesh.cells.find(({ rank }) => rank === this.#rank);
    const chosen = cell ? ` · rank ${cell.rank}${cell.place ? ` (${cell.place})` : ""} holds ${cell.size}` : "";
    const isFiltered = tensors.length < data.tensors.length;
    const count = isFiltered ? ` · ${tensors.length} of ${data.tensors.length} tensors` : "";
    page.state.textContent = `${count}${chosen}${changes}`.slice(3);
    this.#drawMesh(data);
    page.body.replaceChildren(
      ...(this.#kind === "list" ? this.#drawList(data, tensors) : this.#drawMap(data, tensors)),
    );
    showPartsOf(page.body, this.#rank);
    page.notes.replaceChildren(...data.notes.map((note) => element("div", {}, note)));
    page.root.dataset.updates = String(data.updates);
  }

  /**
   * @param {Content} data
   * @param {Tensor[]} tensors
   */
  #drawMap({ drawings }, tensors) {
    const width = Math.max(240, (this.page.body.clientWidth || 700) - 2 * MAP_MARGIN);
    const map = drawMap(tensors, drawings, { width, theme: this.theme }, this.#showTooltip);
    return [makeLegend(tensors, drawings), map];
  }

  /**
   * @param {Content} data
   * @param {Tensor[]} tensors
   */
  #drawList(data, tensors) {
    const head = element("tr", {}, ...COLUMNS.map((title) => element("th", { scope: "col" }, title)));
    const folded = foldTensors(tensors);
    const rows = folded.slice(0, this.#maxRows).flatMap((alike) => this.#drawAlike(data, alike));
    const table = element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows));
    if (folded.length <= this.#maxRows) return [table];
    const more = element("button", { type: "button" }, `${folded.length - this.#maxRows} more`);
    more.addEventListener("click", () => {
      this.#maxRows *= 4;
      this.#draw();
    });
    return [table, more];
  }

  /** @param {Content} data */
  #drawMesh({ mesh }) {
    const hadFocus = this.page.mesh.contains(document.activeElement);
    const grid = makeMesh(mesh, this.#rank, (rank) => {
      this.#rank = rank;
      this.#draw();
    });
    this.page.mesh.replaceChildren(...(mesh.cells.length > 1 ? [grid] : []));
    const focused = /** @type {HTMLElement | null} */ (grid.querySelector("[tabindex='0']"));
    if (hadFocus) focused?.focus();
  }

  /**
   * One row for tensors that are alike, until it is unfolded.
   *
   * @param {Content} data
   * @param {Alike} alike
   */
  #drawAlike(data, { name, key, tensors }) {
    if (tensors.length === 1) return this.#drawRow(data, tensors[0]);
    const isOpen = this.#unfolded.has(key);
    const attributes = { type: "button", class: "axon-shards-fold", "aria-expanded": String(isOpen) };
    const fold = element("button", attributes, `${isOpen ? "▾" : "▸"} ${tensors.length} alike`);
    fold.addEventListener("click", (event) => {
      event.stopPropagation();
      if (!this.#unfolded.delete(key)) this.#unfolded.add(key);
      this.#draw();
    });
    fold.addEventListener("keydown", (event) => event.stopPropagation());
    const [line, ...details] = this.#drawRow(data, tensors[0]);
    line.firstElementChild?.replaceChildren(name, " ", fold);
    if (isOpen) delete line.dataset.name; // it is that of one of the rows below
    line.classList.toggle(
      "axon-shards-changed",
      tensors.some((tensor) => this.#changed.has(keyOf(tensor))),
    );
    return [line, ...details, ...(isOpen ? tensors.flatMap((tensor) => this.#drawRow(data, tensor)) : [])];
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
    const parts = element("td", {}, drawParts(drawing, this.theme, this.#showTooltip));
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
