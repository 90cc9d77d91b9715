// @ts-check
// Spans that belong together: a collective on all ranks, a microbatch in all stages; and how they are shown.

import { getContext, resizeCanvas } from "../../shared/canvas.js";
import { forEachBetween } from "../blocks.js";

/** @import { Theme } from "../../shared/theme.js" */
/** @import { TimeRange } from "../../shared/time_axis.js" */
/** @import { Geometry } from "../layout.js" */
/** @import { Rows } from "../rows.js" */
/** @import { Config, Store } from "../store.js" */

const REACH = 120; // seconds, in which all ranks call a collective

/**
 * The spans that belong together with a span, including itself; empty: there are none.
 *
 * @param {Store} store
 * @param {number} index
 * @param {number[]} steps when steps ended, in seconds
 */
export function familyOf(store, index, steps) {
  const { start, duration: length, label, sequence, microbatch } = store.columns;
  const [, name, group] = store.labels[label[index]];
  /** @type {number[]} */
  const found = [];
  if (microbatch[index] >= 0) {
    const from = steps.filter((end) => end <= start[index]).pop() ?? -Infinity;
    const to = steps.find((end) => end > start[index]) ?? Infinity;
    forEachBetween(store, Math.max(from, start[index] - REACH), Math.min(to, start[index] + REACH), (i) => {
      const isSame = microbatch[i] === microbatch[index] && store.labels[label[i]][2] === group;
      if (isSame && start[i] >= from && start[i] < to) found.push(i);
    });
  } else if (sequence[index] && group) {
    forEachBetween(store, start[index] - REACH, start[index] + length[index] + REACH, (i) => {
      if (sequence[i] !== sequence[index]) return;
      const [, otherName, otherGroup] = store.labels[label[i]];
      if (otherName === name && otherGroup === group) found.push(i);
    });
  }
  return found.length > 1 ? found : [];
}

/**
 * A step in which others waited for a rank, and when each of them did, in seconds.
 *
 * @typedef {{rank: number, range: TimeRange, waits: {rank: number, from: number, to: number}[]}} LateStep
 */

/**
 * The step of the shown cell in which others waited longest for a rank; null: they never did.
 *
 * @param {Store} store
 * @param {number[]} steps when steps ended, in seconds
 * @param {number} late the rank
 * @returns {LateStep | null}
 */
export function worstStep(store, steps, late) {
  const { start, duration: length, late: waited, by, rank } = store.columns;
  const [first, last] = [store.focus[0] ?? -Infinity, store.focus[1] ?? Infinity];
  /** @type {Map<number, LateStep["waits"]>} */
  const found = new Map();
  for (let i = store.skip; i < store.count; i++) {
    if (by[i] !== late || rank[i] === late || !(waited[i] > 0) || start[i] < first || start[i] > last) continue;
    const ready = start[i] + Math.min(waited[i], length[i]);
    const step = steps.findIndex((end) => end >= ready);
    found.set(step, [...(found.get(step) ?? []), { rank: rank[i], from: start[i], to: ready }]);
  }
  const cost = (/** @type {LateStep["waits"]} */ waits) => waits.reduce((sum, { from, to }) => sum + to - from, 0);
  const [worst] = [...found].sort(([, a], [, b]) => cost(b) - cost(a));
  if (!worst) return null;
  const [step, waits] = worst;
  const [begins, ends] = [waits.map(({ from }) => from), waits.map(({ to }) => to)];
  const from = Math.max(first, Math.min(steps[step - 1] ?? -Infinity, ...begins));
  const to = Math.min(last, steps[step] ?? Math.max(...ends));
  return { rank: late, range: { from: Number.isFinite(from) ? from : Math.min(...begins), to }, waits };
}

/** A canvas above the rows that dims all but a family, or all but a late rank and the waits for it. */
export class Highlight {
  /**
   * @param {HTMLCanvasElement} canvas
   * @param {Config} config
   * @param {Store} store
   */
  constructor(canvas, config, store) {
    this.canvas = canvas;
    this.config = config;
    this.store = store;
  }

  /**
   * Show a family; an empty one hides the canvas.
   *
   * @param {number[]} family
   * @param {{range: TimeRange, rows: Rows, geometry: Geometry, theme: Theme}} frame
   */
  show(family, { range: { from, to }, rows, geometry, theme }) {
    const { canvas, store } = this;
    canvas.hidden = !family.length;
    canvas.dataset.family = String(family.length);
    if (!family.length) return;
    const { context, ratio } = this.#dim(rows, geometry, theme);
    const { start, duration: length, rank, label } = store.columns;
    const scale = canvas.width / (to - from);
    for (const index of family) {
      const row = rows.rowOf[rank[index]] ?? -1;
      const { lane } = this.config.paints[store.labels[label[index]][0]];
      if (row < 0 || lane < 0) continue;
      const [top, laneHeight] = geometry.lanes[lane];
      const left = (start[index] - from) * scale;
      context.clearRect(
        left,
        (row * geometry.height + top) * ratio,
        Math.max(2, length[index] * scale),
        laneHeight * ratio,
      );
    }
    if (store.columns.microbatch[family[0]] >= 0) return;
    const last = (Math.max(...family.map((index) => start[index])) - from) * scale;
    context.strokeStyle = theme.of("accent");
    context.lineWidth = ratio;
    context.setLineDash([3 * ratio, 3 * ratio]);
    context.strokeRect(last, -ratio, 0, canvas.height + 2 * ratio);
    context.setLineDash([]);
  }

  /**
   * Dim all but a rank and the times in which others wait for it.
   *
   * @param {LateStep} step
   * @param {{range: TimeRange, rows: Rows, geometry: Geometry, theme: Theme}} frame
   */
  showLate({ rank, waits }, { range: { from, to }, rows, geometry, theme }) {
    const { canvas } = this;
    canvas.hidden = false;
    canvas.dataset.late = String(rank);
    const { context, ratio } = this.#dim(rows, geometry, theme);
    const scale = canvas.width / (to - from);
    for (const lit of [{ rank, from, to }, ...waits]) {
      const row = rows.rowOf[lit.rank] ?? -1;
      const [left, width] = [(lit.from - from) * scale, Math.max(2, (lit.to - lit.from) * scale)];
      context.clearRect(left, row * geometry.height * ratio, width, geometry.height * ratio);
    }
  }

  /**
   * @param {Rows} rows
   * @param {Geometry} geometry
   * @param {Theme} theme
   */
  #dim(rows, geometry, theme) {
    const { canvas } = this;
    const ratio = resizeCanvas(canvas, canvas.clientWidth, rows.list.length * geometry.height);
    const context = getContext(canvas);
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.globalAlpha = 0.62;
    context.fillStyle = theme.of("page");
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.globalAlpha = 1;
    return { context, ratio };
  }
}
