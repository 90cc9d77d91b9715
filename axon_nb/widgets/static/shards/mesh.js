// @ts-check
// The mesh as a grid of ranks, one of which can be selected; and what of the drawings is that rank's.

import { element } from "../shared/dom.js";
import { NUM_COLORS } from "./drawing.js";

/** @typedef {{rank: number, place: string, size: string}} MeshCell of a rank: its coordinates and bytes, as text */

/** @typedef {{title: string, columns: number, cells: MeshCell[]}} Mesh cells row by row */

const MAX_NUMBERED = 64; // ranks that are written into their squares

/**
 * The mesh; a tall one lies on its side.
 *
 * @param {Mesh} mesh
 * @param {number} selected rank; -1: none
 * @param {(rank: number) => void} onSelect called with -1 if none is selected anymore
 */
export function makeMesh({ title, columns, cells }, selected, onSelect) {
  const isTall = cells.length / columns > columns;
  const [across, down] = isTall ? [columns, 1] : [1, columns];
  /** @type {Record<string, number>} */
  const moves = { ArrowLeft: -across, ArrowRight: across, ArrowUp: -down, ArrowDown: down };
  const start = Math.max(
    0,
    cells.findIndex(({ rank }) => rank === selected),
  );
  const buttons = cells.map(({ rank, place, size }, i) => {
    const where = [place, size].filter(Boolean).join(", ");
    const label = `rank ${rank}: ${where}`;
    const button = element("button", { type: "button", title: label, "aria-label": label, "data-rank": rank });
    button.append(cells.length > MAX_NUMBERED ? "" : String(rank));
    button.setAttribute("aria-pressed", String(rank === selected));
    button.tabIndex = i === start ? 0 : -1;
    button.style.setProperty("--paint", `var(--axon-rank-${rank % NUM_COLORS})`);
    button.addEventListener("click", () => onSelect(rank === selected ? -1 : rank));
    button.addEventListener("keydown", (event) => {
      const next = buttons[i + (moves[event.key] ?? Number.NaN)];
      if (!next) return;
      event.preventDefault();
      next.focus();
    });
    return button;
  });
  const grid = element("div", { class: "axon-shards-mesh", role: "group", "aria-label": title }, ...buttons);
  grid.dataset.dense = String(cells.length > MAX_NUMBERED);
  grid.dataset.tall = String(isTall);
  grid.style.setProperty("--columns", String(columns));
  const caption = element("div", { class: "axon-view-muted axon-shards-caption" }, title);
  return element("div", {}, caption, grid);
}

/**
 * Fade the parts of a drawing that a rank does not hold.
 *
 * @param {Element} root
 * @param {number} selected rank; -1: none, all are as they are
 */
export function showPartsOf(root, selected) {
  for (const part of root.querySelectorAll(".axon-shards-part")) {
    const ranks = (part.getAttribute("data-ranks") ?? "").split(" ");
    part.toggleAttribute("data-pale", selected >= 0 && !ranks.includes(String(selected)));
  }
}
