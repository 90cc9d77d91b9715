// @ts-check
// What is selected in a timeline, by pointer or keys: the span below the pointer, a pinned one, stretches of time.

import { makePairs } from "../../shared/card.js";
import { formatDuration } from "../../shared/format.js";
import { Cursor } from "./cursor.js";
import { Details } from "./details.js";
import { familyOf, Highlight, worstStep } from "./family.js";
import { ownCodeAt, spanAt } from "./search.js";
import { describe, spanFacts } from "./text.js";

/** @import { Position } from "../../shared/pointer.js" */
/** @import { Theme } from "../../shared/theme.js" */
/** @import { TimeRange } from "../../shared/time_axis.js" */
/** @import { DetailsView } from "./details.js" */
/** @import { SpanSelection } from "../filter.js" */
/** @import { Geometry } from "../layout.js" */
/** @import { Rows } from "../rows.js" */
/** @import { LateStep } from "./family.js" */

/**
 * What a selection needs of its timeline.
 *
 * @typedef {object} SelectionParts
 * @property {HTMLElement} details
 * @property {HTMLCanvasElement} highlight
 * @property {HTMLCanvasElement} canvas
 * @property {HTMLElement} scroll
 * @property {HTMLElement} live announces to screen readers
 */

/**
 * @typedef {Omit<DetailsView, "unpin" | "zoomTo"> & {
 *   parts: SelectionParts,
 *   readonly range: TimeRange,
 *   readonly rows: Rows,
 *   readonly geometry: Geometry,
 *   readonly theme: Theme,
 *   readonly drawn: SpanSelection,
 *   showRange: (range: TimeRange) => void,
 *   stopFollowing: () => void,
 *   request: () => void,
 *   showText: (content: string | Node[], x?: number, y?: number) => void,
 * }} SelectionView
 */

/** The selection of one timeline. */
export class Selection {
  /** @type {TimeRange[]} */
  measured = [];
  /** @type {LateStep | null} */
  late = null;

  /** @param {SelectionView} view */
  constructor(view) {
    this.view = view;
    const { store, config, derived, parts } = view;
    this.cursor = new Cursor(store, () => view.rows);
    this.highlight = new Highlight(parts.highlight, config, store);
    const [zero, drawn] = [view.zero, () => view.drawn];
    const zoomTo = (/** @type {TimeRange} */ range) => {
      this.clear();
      view.showRange(range);
    };
    const unpin = () => this.clear();
    this.details = new Details(parts.details, { store, config, derived, zero, selection: drawn, zoomTo, unpin });
  }

  /** Whether anything is selected. */
  get isOn() {
    return Boolean(this.cursor.mark ?? this.late) || this.measured.length > 0;
  }

  clear() {
    this.measured = [];
    this.late = null;
    this.dim();
    this.cursor.clear();
    this.details.close();
    this.view.parts.canvas.focus();
    this.view.showText("");
    this.view.request();
  }

  /**
   * Show the step in which others waited longest for a rank, and dim the rest; or everything, if it is shown already.
   * Returns the range to show.
   *
   * @param {number} rank
   */
  toggleLate(rank) {
    const { store, derived } = this.view;
    this.late = this.late?.rank === rank ? null : worstStep(store, derived.steps, rank);
    this.dim();
    return this.late?.range ?? null;
  }

  /**
   * Dim all but some spans that belong together, or what is shown of a late rank.
   *
   * @param {number[]} family
   */
  dim(family = []) {
    const { range, rows, geometry, theme } = this.view;
    const frame = { range, rows, geometry, theme };
    if (this.late && !family.length) this.highlight.showLate(this.late, frame);
    else this.highlight.show(family, frame);
  }

  /**
   * Do what a key means: choose a lane or a span, pin it, unpin it.
   *
   * @param {string} key
   */
  onKey(key) {
    const { mark } = this.cursor;
    if (key === "ArrowUp" || key === "ArrowDown") {
      this.view.parts.live.textContent = this.cursor.moveLane(key === "ArrowDown" ? 1 : -1);
    } else if (key === "n" || key === "p") {
      this.#moveSpan(key === "n" ? 1 : -1);
    } else if (key === "Enter" && mark && mark.index >= 0) {
      this.#pin(mark.index);
    } else if (key === "Escape") {
      this.clear();
    }
    this.view.request();
  }

  /** @param {number} direction 1: the next span, -1: the previous one */
  #moveSpan(direction) {
    const { view } = this;
    const { store, config, range, parts } = view;
    const { from, to } = range;
    const mark = this.cursor.moveSpan(direction, range, view.drawn);
    if (!mark) return;
    const start = store.columns.start[mark.index];
    const length = to - from;
    const isVisible = start >= from && start + store.columns.duration[mark.index] <= to;
    if (isVisible) view.stopFollowing();
    else view.showRange({ from: start - length / 4, to: start + (3 * length) / 4 });
    parts.live.textContent = describe(store, mark.index, config, view.zero());
    const { canvas, scroll } = parts;
    const x = Math.max(0, ((start - view.range.from) / length) * canvas.clientWidth);
    const y = canvas.offsetTop - scroll.scrollTop + mark.row * view.geometry.height;
    const { title, pairs } = spanFacts(store, mark.index, config, view.zero());
    view.showText(makePairs(title, pairs), canvas.offsetLeft + x, y);
  }

  /**
   * Pin the span below the pointer.
   *
   * @param {Position} position
   * @param {number} time
   */
  onClick(position, time) {
    const { row, lane, index } = this.#spanBelow(position, time);
    if (index < 0) return;
    this.cursor.select(row, lane, index);
    this.#pin(index);
  }

  /** @param {number} index */
  #pin(index) {
    this.measured = [];
    this.details.showSpan(index);
    this.view.request();
  }

  /**
   * Measure a stretch of time; with the shift key, compare it with the previous one.
   *
   * @param {TimeRange} range
   * @param {boolean} hasShift
   */
  onMark(range, hasShift) {
    this.cursor.clear();
    this.measured = hasShift && this.measured.length ? [this.measured[0], range] : [range];
    this.details.showRanges(this.measured);
    this.view.request();
  }

  /**
   * @param {Position} position
   * @param {number} time
   */
  #spanBelow({ y }, time) {
    const { store, range, rows, drawn, geometry, parts } = this.view;
    const row = Math.floor(y / geometry.height);
    const lane = y - row * geometry.height < geometry.lanes[1][0] ? 0 : 1;
    const near = (2 * (range.to - range.from)) / parts.canvas.clientWidth;
    return { row, lane, index: spanAt(store, { ...drawn, rows, row, lane, time, near }) };
  }

  /**
   * Describe what is below the pointer, and show the spans that belong to it; empty: nothing.
   *
   * @param {Position | null} position on the canvas; null: the pointer has left
   * @param {number} time in seconds
   */
  describeAt(position, time) {
    const { store, config, derived, rows, drawn, parts } = this.view;
    const { row, lane, index } = position ? this.#spanBelow(position, time) : { row: -1, lane: 0, index: -1 };
    const family = index < 0 ? [] : familyOf(store, index, derived.steps);
    this.dim(family);
    if (index >= 0 && this.cursor.mark?.index === index && parts.details.childElementCount) return ""; // shown there
    if (index >= 0) {
      const { title, pairs } = spanFacts(store, index, config, this.view.zero(), derived.tailOf(store.first + index));
      return makePairs(title, pairs);
    }
    const [rank, ...others] = rows.list[row]?.ranks ?? [];
    if (lane || rank === undefined || others.length) return "";
    const own = ownCodeAt(store, { ...drawn, rank, time });
    if (!own) return "";
    return makePairs("own code", [
      ["rank", String(rank)],
      ["took", formatDuration(own.to - own.from)],
    ]);
  }
}
