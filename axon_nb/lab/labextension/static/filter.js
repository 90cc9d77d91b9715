// @ts-check
// Dims what other ranks printed. It paints ranges of text, so no output and no saved notebook is changed.

import { expandRanks } from "./words.js";

const NAME = "axon-other-ranks"; // of ::highlight() in panel.css
const LABEL = /^\[ranks? ([\d,-]+)\]/gm;

/** Shows the output of one rank. */
export class RankFilter {
  /** @type {number | null} */
  rank = null;

  /** @param {() => Element | null} notebook the one in front */
  constructor(notebook) {
    this.notebook = notebook;
  }

  /** Show the output of a rank; if it is shown already, that of all ranks. */
  toggle(/** @type {number} */ rank) {
    this.rank = this.rank === rank ? null : rank;
    this.apply();
  }

  /** Look for output again. */
  apply() {
    if (!("highlights" in CSS)) return; // older than 2025
    CSS.highlights.delete(NAME);
    const { rank } = this;
    if (rank === null) return;
    const outputs = this.notebook()?.querySelectorAll(".jp-OutputArea-output pre") ?? [];
    const ranges = [...outputs].flatMap((output) => rangesOfOthers(output, rank));
    CSS.highlights.set(NAME, new Highlight(...ranges));
  }
}

/**
 * The parts of an output that belong to other ranks: each goes from its label to the next one.
 *
 * @param {Element} output
 * @param {number} rank
 */
function rangesOfOthers(output, rank) {
  const text = output.textContent ?? "";
  const labels = [...text.matchAll(LABEL)];
  const parts = labels.map((label, i) => ({
    ranks: label[1],
    from: label.index,
    to: labels[i + 1]?.index ?? text.length,
  }));
  return parts
    .filter(({ ranks }) => !expandRanks(ranks).includes(rank))
    .map(({ from, to }) => {
      const range = new Range();
      range.setStart(...positionOf(output, from));
      range.setEnd(...positionOf(output, to));
      return range;
    });
}

/**
 * The text node at an offset into an element's text.
 *
 * @param {Element} element
 * @param {number} offset
 * @returns {[Node, number]}
 */
function positionOf(element, offset) {
  const nodes = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  let rest = offset;
  for (let node = nodes.nextNode(); node; node = nodes.nextNode()) {
    const { length } = node.nodeValue ?? "";
    if (rest <= length) return [node, rest];
    rest -= length;
  }
  return [element, element.childNodes.length];
}
