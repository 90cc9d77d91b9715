// @ts-check
// Each rank's memory as stacked bars on one axis.

import { makeSwatch } from "../shared/card.js";
import { element } from "../shared/dom.js";

/** @import { Cell } from "../shared/card.js" */

/**
 * Memory as shares of an axis, from 0 to 1; peak and capacity are missing if unknown.
 *
 * @typedef {object} Bar
 * @property {[role: string, share: number][]} segments
 * @property {string[]} [labels] of the segments; empty where there is no room
 * @property {number | null} [peak]
 * @property {number | null} [capacity]
 * @property {string} text
 */

/** @typedef {Bar & {label: string}} LabelledBar */

/** @typedef {{share: number, label: string}} Tick of the axis */

/**
 * @typedef {object} Row
 * @property {number} rank
 * @property {Bar} measured
 * @property {Bar | null} estimated
 * @property {{text: string}} process
 * @property {string} flag why the rank is flagged; empty: it is not
 * @property {string} total
 * @property {string} remark how it compares
 * @property {(Cell | string)[]} cells of the table
 */

/**
 * A share as a length for CSS, clamped to 0-100 %.
 *
 * @param {number} share
 */
export function percent(share) {
  return `${(100 * Math.max(0, Math.min(1, share))).toFixed(2)}%`;
}

/**
 * Describe a rank: its bars, and why it is flagged.
 *
 * @param {Row} row
 */
export function describeRow(row) {
  const bars = [row.measured, row.estimated, row.process].map((bar) => bar?.text);
  return `rank ${row.rank}: ${[...bars, row.flag].filter(Boolean).join("; ")}`;
}

/**
 * Describe the ranks that are flagged and were not before.
 *
 * @param {Row[]} before
 * @param {Row[]} rows
 */
export function newFlags(before, rows) {
  const flagged = new Set(before.filter((row) => row.flag).map((row) => row.rank));
  return rows.filter((row) => row.flag && !flagged.has(row.rank)).map((row) => `rank ${row.rank}: ${row.flag}`);
}

/**
 * @param {Bar} bar
 * @param {"measured" | "estimated"} kind
 */
function makeBar(bar, kind) {
  const root = element("div", { class: `axon-memory-bar axon-memory-${kind}`, role: "img", "aria-label": bar.text });
  root.title = bar.text;
  bar.segments.forEach(([role, share], i) => {
    const label = kind === "measured" ? (bar.labels?.[i] ?? "") : "";
    const segment = element("i", { "data-role": role }, ...(label ? [element("span", {}, label)] : []));
    segment.style.width = percent(share);
    segment.style.setProperty("--paint", `var(--axon-role-${role})`);
    segment.style.setProperty("--ink", `var(--axon-on-role-${role})`);
    root.append(segment);
  });
  for (const mark of /** @type {const} */ (["peak", "capacity"])) {
    const share = bar[mark] ?? null;
    if (share === null || (mark === "capacity" && share >= 1)) continue;
    const line = element("div", { class: `axon-memory-${mark}` });
    line.style.left = percent(share);
    root.append(line);
  }
  return root;
}

/**
 * A rank's bars, between its name and its total.
 *
 * @param {Row} row
 */
export function makeRow(row) {
  const bars = element("div", { class: "axon-memory-bars" }, makeBar(row.measured, "measured"));
  if (row.estimated) bars.append(makeBar(row.estimated, "estimated"));
  const name = element("b", {}, `rank ${row.rank}`);
  const remark = element("small", { class: row.flag ? "axon-view-flagged" : "axon-view-muted" }, row.remark);
  const total = element("span", { class: "axon-memory-total" }, element("b", {}, row.total), " ", remark);
  const attributes = { class: "axon-memory-row", "data-rank": row.rank, role: "group", "aria-label": describeRow(row) };
  return element("div", attributes, name, bars, total);
}

/** @param {LabelledBar} bar */
export function makePredictionRow(bar) {
  const bars = element("div", { class: "axon-memory-bars" }, makeBar(bar, "measured"));
  const total = element("b", { class: "axon-memory-total" }, bar.text.split(" (")[0]);
  return element(
    "div",
    { class: "axon-memory-row", "data-label": bar.label },
    element("span", {}, bar.label),
    bars,
    total,
  );
}

/**
 * The axis below the bars.
 *
 * @param {Tick[]} ticks
 */
export function makeAxis(ticks) {
  const marks = ticks.map(({ share, label }, i) => {
    const place = i === 0 ? "start" : share > 0.97 ? "end" : "middle";
    const mark = element("span", { "data-place": place }, label);
    mark.style.left = percent(share);
    return mark;
  });
  const axis = element("div", { class: "axon-memory-axis", "aria-hidden": "true" }, ...marks);
  return element("div", { class: "axon-memory-row" }, element("span"), axis, element("span"));
}

/** @param {string[]} roles */
export function makeLegend(roles) {
  return roles.map((role) => element("span", { class: "axon-view-key" }, makeSwatch(`role-${role}`), role));
}
