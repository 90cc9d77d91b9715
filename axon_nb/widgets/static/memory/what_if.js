// @ts-check
// What-if scenarios: memory with other ranks, strategies, optimizers.

import { makeNotice, makeSwatch } from "../shared/card.js";
import { element } from "../shared/dom.js";
import { makeAxis, makePredictionRow } from "./bars.js";

/** @import { Notice } from "../shared/card.js" */
/** @import { Model } from "../shared/wire.js" */
/** @import { LabelledBar, Tick } from "./bars.js" */

/** @typedef {string | number | boolean} Value */

/**
 * A control.
 *
 * @typedef {object} Field
 * @property {string} name
 * @property {string} label
 * @property {Value} current of the current setup
 * @property {Value} value of the proposed setup
 * @property {[value: string, label: string][]} [choices]
 */

/**
 * What the kernel sends; empty if it offers no scenarios.
 *
 * @typedef {object} Prediction
 * @property {Field[]} fields
 * @property {string} doing
 * @property {number | null} share of it that is done, from 0 to 1
 * @property {string} error
 * @property {string} heading
 * @property {Notice | null} verdict
 * @property {LabelledBar[]} bars
 * @property {Tick[]} ticks
 * @property {string} unit
 * @property {Change[]} changes by role
 * @property {string[]} notes
 */

/**
 * A role's memory now and as proposed, in the unit of the table.
 *
 * @typedef {object} Change
 * @property {string} role
 * @property {string} now
 * @property {string} then
 * @property {string} change
 * @property {number} share of the largest change, 0 to 1
 * @property {boolean} isLess
 */

/** @typedef {Record<string, string | boolean>} Values of the controls, by name */

/**
 * Whether a control has an effect with these values.
 *
 * @param {string} name
 * @param {Values} values
 */
export function applies(name, values) {
  if (name === "shard") return values.strategy === "hybrid_shard";
  return name !== "num_microbatches" || Number(values.pp) > 1;
}

/**
 * The values that differ from the current setup; numbers as they are typed.
 *
 * @param {Pick<Field, "name" | "current">[]} fields
 * @param {Values} values
 */
export function difference(fields, values) {
  /** @type {Values} */
  const changes = {};
  for (const field of fields) {
    const value = values[field.name];
    if (applies(field.name, values) && String(value) !== String(field.current)) changes[field.name] = value;
  }
  return changes;
}

/**
 * Text for the work in progress, with the share that is done if it is known.
 *
 * @param {string} doing
 * @param {number | null} share
 */
export function progressText(doing, share) {
  return doing && typeof share === "number" ? `${doing} (${Math.round(100 * share)} %)` : doing;
}

/**
 * @param {Field} field
 * @param {Value} value
 */
function makeInput(field, value) {
  if (typeof field.current === "boolean") {
    const input = element("input", { type: "checkbox" });
    input.checked = Boolean(value);
    return input;
  }
  const input = field.choices
    ? element("select", {}, ...field.choices.map(([choice, label]) => element("option", { value: choice }, label)))
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
  const chosen = field.choices?.find(([choice]) => choice === field.current)?.[1] ?? field.current;
  const was = typeof chosen === "boolean" ? (chosen ? "on" : "off") : chosen;
  const name = element("span", {}, field.label, element("small", {}, `was ${was}`));
  return element("label", { class: "axon-memory-control", "data-name": field.name }, name, input);
}

/**
 * @param {Change[]} changes
 * @param {string} unit
 */
function makeChanges(changes, unit) {
  const titles = [unit, "now", "proposed", "less or more", "change"];
  const head = titles.map((title, i) =>
    element("th", { scope: "col", class: i && i !== 3 ? "axon-view-number" : "" }, title),
  );
  const rows = changes.map(({ role, now, then, change, share, isLess }) => {
    const bar = element("i", { class: isLess ? "axon-memory-less" : "axon-memory-more" });
    bar.style.width = `${(50 * share).toFixed(1)}%`;
    const numbers = [now, then].map((text) => element("td", { class: "axon-view-number" }, text));
    const name = element("th", { scope: "row" }, makeSwatch(`role-${role}`), ` ${role}`);
    const track = element("td", { class: "axon-memory-change" }, element("span", {}, bar));
    return element("tr", {}, name, ...numbers, track, element("td", { class: "axon-view-number" }, change));
  });
  return element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows));
}

/** @param {HTMLInputElement | HTMLSelectElement} input */
function currentValue(input) {
  return input instanceof HTMLInputElement && input.type === "checkbox" ? input.checked : input.value;
}

function buildElements() {
  const controls = element("div", { class: "axon-memory-controls", role: "group", "aria-label": "what if" });
  const reset = element("button", { type: "button", class: "axon-memory-reset" }, "reset");
  const doing = element("span", { class: "axon-view-muted", role: "status" });
  const bar = element("progress", { max: "1", "aria-label": "simulation" });
  const error = element("div", { class: "axon-memory-error", role: "alert" });
  const heading = element("div", { class: "axon-memory-answer axon-view-muted", "aria-live": "polite" });
  const [verdict, bars, changes] = [element("div"), element("div"), element("div", { class: "axon-view-scroll" })];
  const notes = element("div", { class: "axon-view-muted" });
  const line = element("div", { class: "axon-memory-doing" }, reset, bar, doing);
  const explained = "a step is simulated in a separate process; the run is not affected";
  const title = element("div", { class: "axon-memory-title" }, element("b", {}, "What if"), " ");
  title.append(element("small", { class: "axon-view-muted" }, explained));
  const form = element("div", {}, controls, line);
  const answer = element("div", { class: "axon-memory-result" }, error, verdict, heading, bars, changes, notes);
  const body = element("div", { class: "axon-memory-columns" }, form, answer);
  const root = element("section", { class: "axon-memory-what-if" }, title, body);
  return { root, controls, reset, doing, bar, error, heading, verdict, bars, changes, notes, line };
}

/** The part of the panel with the scenario's controls and prediction. */
export class WhatIf {
  #drawn = "";

  /** @param {Model} model */
  constructor(model) {
    this.model = model;
    this.page = buildElements();
    this.root = this.page.root;
    this.page.controls.addEventListener("change", () => this.#request());
    this.page.controls.addEventListener("keydown", (event) => event.stopPropagation()); // Lab has keys of its own
    this.page.reset.addEventListener("click", () => {
      this.#drawn = "";
      this.#build(this.#fields, true);
      this.#request();
    });
  }

  get isEmpty() {
    return !this.#fields.length;
  }

  draw = () => {
    /** @type {Prediction} */
    const data = this.model.get("what_if");
    const { page } = this;
    this.root.hidden = !Object.keys(data).length;
    if (this.root.hidden) return;
    this.#build(data.fields, false);
    page.line.hidden = page.controls.hidden = !data.fields.length && !data.doing;
    page.reset.hidden = !data.fields.length;
    page.bar.hidden = data.share === null;
    if (data.share !== null) page.bar.value = data.share;
    page.doing.textContent = progressText(data.doing, data.share);
    page.error.textContent = data.error;
    page.heading.textContent = data.heading;
    this.root.setAttribute("aria-busy", String(Boolean(data.doing)));
    page.verdict.replaceChildren(...(data.verdict ? [makeNotice(data.verdict)] : []));
    page.bars.replaceChildren(...data.bars.map(makePredictionRow), ...(data.bars.length ? [makeAxis(data.ticks)] : []));
    page.changes.replaceChildren(...(data.changes.length ? [makeChanges(data.changes, data.unit)] : []));
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
    const values = this.#values();
    /** @type {NodeListOf<HTMLElement>} */
    const labels = this.page.controls.querySelectorAll("label");
    const changes = difference(this.#fields, values);
    for (const label of labels) {
      const name = label.dataset.name ?? "";
      label.hidden = !applies(name, values);
      label.classList.toggle("axon-memory-differs", name in changes);
    }
    this.page.reset.disabled = Object.keys(changes).length === 0;
  }

  #request() {
    this.#showControls();
    const changes = difference(this.#fields, this.#values());
    this.model.send({ op: "what_if", setup: Object.keys(changes).length ? changes : null });
  }

  /**
   * Make the controls if the current setup has changed, and leave them to the user otherwise.
   *
   * @param {Field[]} fields
   * @param {boolean} isReset whether they show the current setup instead of the proposed one
   */
  #build(fields, isReset) {
    const current = JSON.stringify(fields.map((field) => [field.name, field.current]));
    if (current === this.#drawn) return;
    this.#drawn = current;
    const shownValue = (/** @type {Field} */ field) => (isReset ? field.current : field.value);
    this.page.controls.replaceChildren(...fields.map((field) => makeControl(field, shownValue(field))));
    this.#showControls();
  }
}
