// @ts-check
// Memory as it would be with other ranks, strategies, optimizers.

import { element } from "../shared/dom.js";
import { makeAnswer, makeLegend } from "./bars.js";

/** @import { Model } from "../shared/wire.js" */
/** @import { LabelledBar } from "./bars.js" */

/** @typedef {string | number | boolean} Value */

/**
 * A control.
 *
 * @typedef {object} Field
 * @property {string} name
 * @property {string} label
 * @property {Value} now what is
 * @property {Value} value what is asked
 * @property {[value: string, label: string][]} [choices]
 */

/**
 * What the kernel answers; empty where it cannot be asked.
 *
 * @typedef {object} Answer
 * @property {Field[]} fields
 * @property {string} doing
 * @property {number | null} share of what is being done, from 0 to 1
 * @property {string} error
 * @property {string} heading
 * @property {string[]} roles
 * @property {LabelledBar[]} bars
 * @property {string[]} notes
 */

/** @typedef {Record<string, string | boolean>} Values of the controls, by name */

/**
 * Whether a control has a meaning with these values.
 *
 * @param {string} name
 * @param {Values} values
 */
export function applies(name, values) {
  if (name === "shard") return values.strategy === "hybrid_shard";
  return name !== "microbatches" || Number(values.pp) > 1;
}

/**
 * What a kernel is asked: the values that differ from what is; numbers as they are typed.
 *
 * @param {Pick<Field, "name" | "now">[]} fields
 * @param {Values} values
 */
export function difference(fields, values) {
  /** @type {Values} */
  const asked = {};
  for (const field of fields) {
    const value = values[field.name];
    if (applies(field.name, values) && String(value) !== String(field.now)) asked[field.name] = value;
  }
  return asked;
}

/**
 * Words for what is being done, with the share of it where it is known.
 *
 * @param {string} doing
 * @param {number | null} share
 */
export function progressWords(doing, share) {
  return doing && typeof share === "number" ? `${doing} (${Math.round(100 * share)} %)` : doing;
}

/**
 * @param {Field} field
 * @param {Value} value
 */
function makeInput(field, value) {
  if (typeof field.now === "boolean") {
    const input = element("input", { type: "checkbox" });
    input.checked = Boolean(value);
    return input;
  }
  const input = field.choices
    ? element("select", {}, ...field.choices.map(([own, label]) => element("option", { value: own }, label)))
    : element("input", { type: "number", min: "1", step: "1" });
  input.value = String(value);
  return input;
}

/**
 * @param {Field} field
 * @param {Value} value
 */
function makeControl(field, value) {
  const input = makeInput(field, value);
  input.name = field.name;
  return element("label", { class: "axon-memory-control", "data-name": field.name }, field.label, input);
}

/** @param {HTMLInputElement | HTMLSelectElement} input */
function currentValue(input) {
  return input instanceof HTMLInputElement && input.type === "checkbox" ? input.checked : input.value;
}

function buildElements() {
  const controls = element("div", { class: "axon-memory-controls", role: "group", "aria-label": "what if" });
  const reset = element("button", { type: "button", class: "axon-memory-reset" }, "as it is");
  const doing = element("span", { class: "axon-view-muted", role: "status" });
  const bar = element("progress", { max: "1", "aria-label": "simulation" });
  const error = element("div", { class: "axon-memory-error", role: "alert" });
  const heading = element("div", { class: "axon-memory-answer", "aria-live": "polite" });
  const legend = element("div", { class: "axon-memory-legend" });
  const table = element("table");
  const notes = element("div", { class: "axon-view-muted" });
  const line = element("div", { class: "axon-memory-doing" }, reset, bar, doing);
  const title = element("b", {}, "What if");
  const root = element("section", { class: "axon-memory-what-if" }, title, controls, line, error, heading, legend);
  root.append(element("div", { class: "axon-memory-scroll" }, table), notes);
  return { root, controls, reset, doing, bar, error, heading, legend, table, notes, line };
}

/** The part of the panel where the kernel is asked. */
export class WhatIf {
  #drawn = "";

  /** @param {Model} model */
  constructor(model) {
    this.model = model;
    this.page = buildElements();
    this.root = this.page.root;
    this.page.controls.addEventListener("change", () => this.#ask());
    this.page.reset.addEventListener("click", () => {
      this.#drawn = "";
      this.#build(this.#fields, true);
      this.#ask();
    });
  }

  get isEmpty() {
    return !this.#fields.length;
  }

  draw = () => {
    /** @type {Answer} */
    const data = this.model.get("what_if");
    const { page } = this;
    this.root.hidden = !Object.keys(data).length;
    if (this.root.hidden) return;
    this.#build(data.fields, false);
    page.line.hidden = page.controls.hidden = !data.fields.length && !data.doing;
    page.reset.hidden = !data.fields.length;
    page.bar.hidden = data.share === null;
    if (data.share !== null) page.bar.value = data.share;
    page.doing.textContent = progressWords(data.doing, data.share);
    page.error.textContent = data.error;
    page.heading.textContent = data.heading;
    this.root.setAttribute("aria-busy", String(Boolean(data.doing)));
    page.legend.replaceChildren(...makeLegend(data.roles));
    page.table.replaceChildren(...data.bars.map(makeAnswer));
    page.notes.replaceChildren(...data.notes.map((note) => element("div", {}, note)));
  };

  /** @returns {Field[]} */
  get #fields() {
    return this.model.get("what_if").fields ?? [];
  }

  #values() {
    /** @type {NodeListOf<HTMLInputElement | HTMLSelectElement>} */
    const inputs = this.page.controls.querySelectorAll("input, select");
    return Object.fromEntries([...inputs].map((input) => [input.name, currentValue(input)]));
  }

  #showControls() {
    const chosen = this.#values();
    /** @type {NodeListOf<HTMLElement>} */
    const labels = this.page.controls.querySelectorAll("label");
    for (const label of labels) label.hidden = !applies(label.dataset.name ?? "", chosen);
    this.page.reset.disabled = Object.keys(difference(this.#fields, chosen)).length === 0;
  }

  #ask() {
    this.#showControls();
    const asked = difference(this.#fields, this.#values());
    this.model.send({ op: "what_if", setup: Object.keys(asked).length ? asked : null });
  }

  /**
   * Make the controls when what is has changed, and leave them to the user otherwise.
   *
   * @param {Field[]} fields
   * @param {boolean} reset whether they show what is, not what is asked
   */
  #build(fields, reset) {
    const now = JSON.stringify(fields.map((field) => [field.name, field.now]));
    if (now === this.#drawn) return;
    this.#drawn = now;
    this.page.controls.replaceChildren(...fields.map((field) => makeControl(field, reset ? field.now : field.value)));
    this.#showControls();
  }
}
