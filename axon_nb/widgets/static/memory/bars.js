// @ts-check
// Each rank's memory as stacked bars.

import { element } from "../shared/dom.js";

/**
 * Memory as shares of a scale, from 0 to 1; peak and capacity are null if unknown.
 *
 * @typedef {object} Bar
 * @property {[role: string, share: number][]} segments
 * @property {number | null} peak
 * @property {number | null} capacity
 * @property {string} text
 */

/** @typedef {Bar & {label: string}} LabelledBar */

/**
 * @typedef {object} Row
 * @property {number} rank
 * @property {Bar} measured
 * @property {Bar | null} estimated
 * @property {Bar} process
 * @property {string} flag why the rank is flagged; empty: it is not
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
 * @param {"measured" | "estimated" | "process"} kind
 */
function makeBar(bar, kind) {
  const root = element("div", { class: `axon-memory-bar axon-memory-${kind}`, role: "img", "aria-label": bar.text });
  root.title = bar.text;
  for (const [role, share] of bar.segments) {
    const segment = element("i", { class: `axon-memory-${role}`, "data-role": role });
    segment.style.width = percent(share);
    root.append(segment);
  }
  for (const mark of /** @type {const} */ (["peak", "capacity"])) {
    const share = bar[mark];
    if (share === null) continue;
    const line = element("div", { class: `axon-memory-${mark}` });
    line.style.left = percent(share);
    root.append(line);
  }
  return root;
}

/**
 * A rank's row of the table.
 *
 * @param {Row} row
 */
export function makeRow(row) {
  const name = element("th", { scope: "row" }, row.flag ? `${row.rank} ⚠` : String(row.rank));
  const bars = element("td", {}, makeBar(row.measured, "measured"));
  const text = element("td", {}, element("div", {}, row.measured.text));
  if (row.estimated) {
    bars.append(makeBar(row.estimated, "estimated"));
    text.append(element("div", { class: "axon-view-muted" }, row.estimated.text));
  }
  const process = element("td", {}, makeBar(row.process, "process"), row.process.text);
  const line = element("tr", { "data-rank": row.rank, "aria-label": describeRow(row) }, name, bars, text, process);
  if (row.flag) line.classList.add("axon-memory-flag");
  return line;
}

/**
 * A row of a prediction's table.
 *
 * @param {LabelledBar} bar
 */
export function makePredictionRow(bar) {
  const name = element("th", { scope: "row" }, bar.label);
  return element("tr", {}, name, element("td", {}, makeBar(bar, "measured")), element("td", {}, bar.text));
}

/** @param {string[]} roles */
export function makeLegend(roles) {
  return roles.map((role) => element("span", {}, element("i", { class: `axon-memory-${role}` }), role));
}
