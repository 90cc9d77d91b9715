// @ts-check
// Figures, the notice and the table of a timeline.

import { makeFigures, makeNotice, makeTable } from "../shared/card.js";
import { element } from "../shared/dom.js";

/** @import { Facts } from "./store.js" */

const MAX_ROWS = 8; // ranks in the table at first

const MAX_LATE = 4;
const MIN_LATE = 0.3; // of what the latest one cost

/**
 * The ranks that others waited for most, in their order; none if nobody waited for anyone in particular.
 *
 * @param {Facts | null} facts
 * @returns {number[]}
 */
export function lateRanks(facts) {
  if (!facts?.notice) return [];
  const column = facts.columns.findIndex(({ title }) => title === "waited for");
  const costs = facts.rows.map(({ rank, cells }) => ({ rank, cost: cells[column]?.share ?? 0 }));
  costs.sort((a, b) => b.cost - a.cost);
  const least = MIN_LATE * (costs[0]?.cost ?? 0);
  const late = costs.slice(0, MAX_LATE).filter(({ cost }) => cost > 0 && cost >= least);
  return late.map(({ rank }) => rank).sort((a, b) => a - b);
}

/**
 * What else would shorten a step, behind a button.
 *
 * @param {string[]} advice
 */
function makeAdvice(advice) {
  const items = advice.map((text) => element("li", {}, text));
  return element(
    "details",
    { class: "axon-advice" },
    element("summary", {}, "more advice"),
    element("ol", {}, ...items),
  );
}

/** The facts of a timeline, above and below its rows. */
export class FactsPanel {
  #showsAll = false;
  /** @type {Facts | null} */
  #facts = null;

  /**
   * @param {{figures: HTMLElement, notice: HTMLElement, table: HTMLElement, note: HTMLElement}} parts
   * @param {(filter: string) => void} onFilter called with the words that show what costs most
   */
  constructor(parts, onFilter) {
    this.parts = parts;
    this.onFilter = onFilter;
  }

  /** @param {Facts | null} facts */
  show(facts) {
    if (!facts || facts === this.#facts) return;
    this.#facts = facts;
    this.#draw();
  }

  #draw() {
    const facts = /** @type {Facts} */ (this.#facts);
    this.parts.figures.replaceChildren(...(facts.figures.length ? [makeFigures(facts.figures)] : []));
    const { notice } = facts;
    this.parts.notice.replaceChildren();
    if (notice) {
      const show = element("button", { type: "button" }, "show it");
      show.addEventListener("click", () => this.onFilter(notice.filter));
      this.parts.notice.append(makeNotice(notice, show));
    }
    if (facts.advice?.length) this.parts.notice.append(makeAdvice(facts.advice));
    const columns = [{ title: "rank" }, ...facts.columns.map(({ title }) => ({ title, isNumber: true }))];
    const rows = this.#rows(facts).map(({ rank, cells }) => ({
      name: `rank ${rank}`,
      cells: cells.map((cell, i) => ({ ...cell, token: facts.columns[i].token })),
      attributes: { "data-rank": rank },
    }));
    this.parts.table.replaceChildren(...(rows.length ? [makeTable(columns, rows)] : []));
    if (facts.rows.length > rows.length) {
      const more = element("button", { type: "button" }, `show all ${facts.rows.length} ranks`);
      more.addEventListener("click", () => {
        this.#showsAll = true;
        this.#draw();
      });
      this.parts.table.append(more);
    }
    this.parts.note.replaceChildren(...facts.notes.map((text) => element("div", {}, text)));
  }

  /**
   * The ranks in the table: of many, those that others waited for most.
   *
   * @param {Facts} facts
   */
  #rows({ rows, columns }) {
    if (this.#showsAll || rows.length <= MAX_ROWS) return rows;
    const column = columns.findIndex(({ title }) => title === "waited for");
    const cost = (/** @type {Facts["rows"][number]} */ { cells }) => cells[column]?.share ?? 0;
    const worst = new Set([...rows].sort((a, b) => cost(b) - cost(a)).slice(0, MAX_ROWS));
    return rows.filter((row) => worst.has(row));
  }
}
