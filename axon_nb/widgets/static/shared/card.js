// @ts-check
// Parts of a view: head with state, figures, notice, legend, tables with bars, segments.

import { element, setText } from "./dom.js";

/** @typedef {{name: string, value: string, remark: string}} Figure a number with its name and a remark */

/** @typedef {{claim: string, text: string, state?: "ok" | "warn" | "error"}} Notice */

/** @typedef {{text: string, share?: number | null, token?: string, flagged?: boolean}} Cell a share, 0 to 1, is a bar */

/** @param {string} title */
export function makeHead(title) {
  const name = element("span", { class: "axon-view-title" }, title);
  const state = element("span", { class: "axon-view-state", hidden: "" });
  const context = element("span", { class: "axon-view-context" });
  const tools = element("span", { class: "axon-view-tools" });
  const head = element("div", { class: "axon-view-head" }, name, state, context, tools);
  return { head, state, context, tools };
}

/** @type {Record<string, string>} */
const STATE_WORDS = { live: "live", ended: "ended", idle: "idle", lost: "no messages from the kernel" };

/**
 * Show how a view is doing.
 *
 * @param {HTMLElement} node
 * @param {"live" | "ended" | "idle" | "lost"} state
 */
export function showState(node, state) {
  if (node.dataset.state === state) return;
  node.hidden = false;
  node.dataset.state = state;
  setText(node, STATE_WORDS[state]);
}

/** @param {Figure[]} figures */
export function makeFigures(figures) {
  const parts = figures.map(({ name, value, remark }) => {
    const number = element("dd", {}, value);
    if (remark) number.append(element("small", {}, remark));
    return element("div", {}, element("dt", {}, name), number);
  });
  return element("dl", { class: "axon-view-figures" }, ...parts);
}

/**
 * @param {Notice} notice
 * @param {(Node | string)[]} actions
 */
export function makeNotice({ claim, text, state = "warn" }, ...actions) {
  const words = element("span", {}, element("b", {}, claim), ` ${text}`);
  return element("div", { class: "axon-view-notice", "data-state": state }, words, ...actions);
}

/**
 * A sample of a colour.
 *
 * @param {string} token name of the colour
 * @param {string} form see `Paint`
 */
export function makeSwatch(token, form = "solid") {
  const swatch = element("i", { class: "axon-view-swatch", "data-form": form });
  swatch.style.setProperty("--paint", `var(--axon-${token})`);
  return swatch;
}

/**
 * @param {{title: string, isNumber?: boolean, hint?: string}[]} columns the first one holds names; a hint is a tooltip
 * @param {{name: string, cells: (Cell | string)[], attributes?: Record<string, string | number>}[]} rows
 */
export function makeTable(columns, rows) {
  const heads = columns.map(({ title, isNumber, hint }) =>
    element(
      "th",
      { scope: "col", ...(isNumber && { class: "axon-view-number" }), ...(hint && { title: hint }) },
      title,
    ),
  );
  const lines = rows.map(({ name, cells, attributes = {} }) => {
    const data = cells.map((cell, i) => {
      const isNumber = Boolean(columns[i + 1]?.isNumber);
      return makeCell(typeof cell === "string" ? { text: cell } : cell, isNumber);
    });
    return element("tr", attributes, element("th", { scope: "row" }, name), ...data);
  });
  const head = element("thead", {}, element("tr", {}, ...heads));
  return element("table", {}, head, element("tbody", {}, ...lines));
}

/**
 * @param {Cell} cell
 * @param {boolean} isNumber
 */
function makeCell({ text, share, token, flagged }, isNumber) {
  const names = [...(isNumber ? ["axon-view-number"] : []), ...(flagged ? ["axon-view-flagged"] : [])];
  const cell = element("td", names.length ? { class: names.join(" ") } : {}, text);
  if (share === undefined || share === null) return cell;
  const filled = element("i");
  filled.style.width = `${(100 * Math.max(0, Math.min(1, share))).toFixed(1)}%`;
  filled.style.setProperty("--paint", `var(--axon-${token ?? "quiet"})`);
  cell.append(element("span", { class: "axon-view-meter", "aria-hidden": "true" }, filled));
  return cell;
}

/**
 * Buttons of which one is pressed.
 *
 * @template {string} Value
 * @param {string} label
 * @param {[value: Value, text: string][]} choices
 * @param {Value} chosen
 * @param {(value: Value) => void} onChoice
 */
export function makeSegments(label, choices, chosen, onChoice) {
  const buttons = choices.map(([value, text]) => {
    const button = element("button", { type: "button", "aria-pressed": String(value === chosen) }, text);
    button.addEventListener("click", () => {
      for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
      onChoice(value);
    });
    return button;
  });
  return element("span", { class: "axon-view-segments", role: "group", "aria-label": label }, ...buttons);
}

/**
 * Names with their values, for a tooltip.
 *
 * @param {string} title
 * @param {[name: string, value: string][]} pairs
 */
export function makePairs(title, pairs) {
  const list = element("dl");
  for (const [name, value] of pairs) list.append(element("dt", {}, name), element("dd", {}, value));
  return [element("b", {}, title), list];
}
