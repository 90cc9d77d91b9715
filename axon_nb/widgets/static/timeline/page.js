// @ts-check
// The elements of a timeline.

import { makeHead, makeSwatch, showState } from "../shared/card.js";
import { create, setText } from "../shared/dom.js";
import { formatDuration } from "../shared/format.js";
import { isRunning } from "./blocks.js";
import { losses } from "./losses.js";

/** @import { TimeRange } from "../shared/time_axis.js" */
/** @import { Rows } from "./rows.js" */
/** @import { Config, Store } from "./store.js" */

const BUTTONS = [
  ["+", "+", "Zoom in (+)"],
  ["−", "-", "Zoom out (−)"],
  ["cell", "Home", "Show the running cell, or the last one (Home)"],
  ["all", "a", "Show everything (a)"],
  ["trace", "save", "Save as a trace for Perfetto"],
  ["picture", "picture", "Save what is shown as a picture (PNG)"],
];

/**
 * @template {keyof HTMLElementTagNameMap} [Tag="div"]
 * @param {string} name
 * @param {Tag} tag
 * @param {Partial<HTMLElementTagNameMap[Tag]>} properties
 */
export function part(name, tag = /** @type {Tag} */ ("div"), properties = {}) {
  return create(tag, `axon-view-${name} axon-timeline-${name}`, properties);
}

/** @param {string} title */
function buildHead(title) {
  const { head, state, context, tools } = makeHead("Timeline");
  const elapsed = create("span", "axon-timeline-elapsed");
  context.append(title && title !== "Timeline" ? `${title} · ` : "", elapsed);
  const placeholder = "filter: all_reduce rank:2";
  const filter = create("input", "axon-view-search", { type: "search", placeholder, ariaLabel: "filter spans" });
  tools.append(filter);
  for (const [textContent, value, hint] of BUTTONS) {
    tools.append(create("button", "", { type: "button", textContent, value, title: hint, ariaLabel: hint }));
  }
  return { head, state, elapsed, tools, filter };
}

/** @param {Config} config */
function buildLegend({ paints }) {
  const legend = part("legend");
  const keys = paints.map((paint) => {
    const item = part("key", "button", { type: "button", title: `hide or show: ${paint.label}`, hidden: true });
    const share = create("small", "");
    item.setAttribute("aria-pressed", "true");
    item.append(makeSwatch(paint.token, paint.form), paint.label, share);
    legend.append(item);
    return { item, share };
  });
  const title = "Draw patterns over the colours, in all views";
  const patterns = part("patterns", "button", { type: "button", textContent: "patterns", title });
  legend.append(patterns);
  return { legend, keys, patterns };
}

/**
 * Show the kinds that have been drawn in the legend, with their share of the ranks' time.
 *
 * @param {ReturnType<typeof buildLegend>["keys"]} keys
 * @param {Config} config
 * @param {Set<number>} drawn codes of kinds
 * @param {Record<string, number>} shares by kind, 0 to 1
 */
export function showLegend(keys, { paints }, drawn, shares) {
  keys.forEach(({ item, share }, kind) => {
    if (drawn.has(kind)) item.hidden = false;
    const known = shares[paints[kind].kind];
    const text = known === undefined ? "" : known > 0 && known < 0.01 ? "<1%" : `${Math.round(100 * known)}%`;
    if (share.textContent !== text) share.textContent = text;
  });
}

function buildRows() {
  const names = part("names");
  const canvas = part("canvas", "canvas", { tabIndex: 0 });
  canvas.setAttribute("role", "img");
  const [overview, axis] = [part("overview", "canvas"), part("axis", "canvas")];
  overview.setAttribute("aria-hidden", "true");
  axis.setAttribute("aria-hidden", "true");
  const grid = part("grid");
  const top = part("top");
  top.append(overview, axis);
  const highlight = part("highlight", "canvas", { hidden: true });
  highlight.setAttribute("aria-hidden", "true");
  grid.append(top, names, canvas, highlight);
  const scroll = part("scroll");
  scroll.append(grid);
  return { scroll, names, canvas, highlight, overview, axis };
}

/**
 * Name the rows. A group of ranks is a button that unfolds it.
 *
 * @param {HTMLElement} names
 * @param {Rows} rows
 * @param {(block: number) => void} onToggle
 */
export function showNames(names, { list }, onToggle) {
  const isFolded = list.some((row) => row.block >= 0);
  if (isFolded) names.removeAttribute("aria-hidden");
  else names.setAttribute("aria-hidden", "true");
  names.replaceChildren(
    ...list.map(({ name, ranks, block }) => {
      const row = create("div", "", { textContent: block < 0 ? name : "" });
      if (block < 0) return row;
      const isOpen = ranks.length === 1;
      const button = create("button", "axon-view-plain", {
        type: "button",
        textContent: `${isOpen ? "▾" : "▸"} ${name}`,
      });
      button.setAttribute("aria-expanded", String(isOpen));
      button.addEventListener("click", () => onToggle(block));
      row.append(button);
      return row;
    }),
  );
}

/**
 * @param {Config} config
 * @param {HTMLElement} el
 */
export function build(config, el) {
  const root = create("div", "axon-view axon-timeline");
  const { head, ...inHead } = buildHead(config.title);
  const { legend, ...inLegend } = buildLegend(config);
  const { scroll, ...inRows } = buildRows();
  const [figures, notice, details, steps, facts] = ["facts-figures", "facts-notice", "details", "steps", "facts"].map(
    (name) => create("div", `axon-timeline-${name}`),
  );
  const [note, losses, tip, brush, live] = ["note", "note", "tip", "brush", "unseen"].map((name) => part(name));
  live.setAttribute("aria-live", "polite");
  tip.hidden = brush.hidden = true;
  facts.classList.add("axon-view-scroll");
  root.append(head, figures, notice, legend, scroll, details, steps, facts, note, losses, tip, brush, live);
  el.append(root);
  return {
    root,
    scroll,
    figures,
    notice,
    details,
    steps,
    facts,
    note,
    losses,
    tip,
    brush,
    live,
    ...inHead,
    ...inLegend,
    ...inRows,
  };
}

/**
 * Describe a timeline as text.
 *
 * @param {ReturnType<typeof build>} parts
 * @param {{store: Store, range: TimeRange, found: number, ranks: number[], isLost: boolean}} shown found: visible spans
 */
export function showStatus(parts, { store, range: { from, to }, found, ranks, isLost }) {
  const spans = store.count - store.skip;
  const live = isLost ? "lost" : isRunning(store) ? "live" : "idle";
  showState(parts.state, store.finished ? "ended" : live);
  const who = `${ranks.length} rank${ranks.length === 1 ? "" : "s"}`;
  const missing = parts.filter.value || !isRunning(store) ? "nothing matches here" : "reading …";
  const none = spans && !found ? ` · ${missing}` : "";
  const time = spans ? ` · ${formatDuration(to - from)}` : "";
  const cell = store.cell && !isRunning(store) ? `${store.cell} · ` : "";
  setText(parts.elapsed, `${cell}${who}${time}${none}`);
  setText(parts.losses, losses(store));
  const { canvas } = parts;
  const label = `Timeline of ${who}. Plus and minus zoom, left and right move, up and down choose a row, n and p go from span to span, Enter pins a span, Home shows the last cell, a everything.`;
  if (canvas.ariaLabel !== label) canvas.ariaLabel = label;
  const view = `${from.toFixed(6)},${to.toFixed(6)}`;
  Object.assign(canvas.dataset, { spans, found, updates: store.updates, end: store.first + store.count, view });
}
