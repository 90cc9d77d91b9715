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

/** A canvas above the rows that dims all but a family. */
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
    const height = rows.list.length * geometry.height;
    const ratio = resizeCanvas(canvas, canvas.clientWidth, height);
    const context = getContext(canvas);
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.globalAlpha = 0.62;
    context.fillStyle = theme.of("page");
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.globalAlpha = 1;
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
}
