// @ts-check
// The rows of a timeline on their canvas.

import { getContext, Painter, resizeCanvas } from "../shared/canvas.js";
import { drawAxis, ticks } from "../shared/time_axis.js";
import { labelRooms, wordsFor } from "./labels.js";
import { geometry, MIN_SHARE, pixelShares } from "./layout.js";
import { everyRow } from "./rows.js";

/** @import { Theme } from "../shared/theme.js" */
/** @import { Run, TimeRange } from "../shared/time_axis.js" */
/** @import { Mark } from "./tools/cursor.js" */
/** @import { Derived } from "./derived.js" */
/** @import { SpanSelection } from "./filter.js" */
/** @import { LabelBox } from "./labels.js" */
/** @import { Rows } from "./rows.js" */
/** @import { Config, Store } from "./store.js" */

/**
 * What is drawn at once.
 *
 * @typedef {object} Frame
 * @property {TimeRange} range
 * @property {number} zero the time labelled 0
 * @property {Rows} rows
 * @property {SpanSelection} selection which spans are drawn
 * @property {Mark | null} mark
 * @property {TimeRange[]} measured stretches of time
 * @property {Theme} theme
 */

/** @typedef {{left: (time: number) => number, top: (row: number, lane: number) => number,
 *   height: (lane: number) => number, pixels: number}} Places of spans, in device pixels */

const MIN_LABELLED = { width: 16, height: 10 }; // of a box that is written on, in pixels of the page
const MIN_WAIT_LABELLED = 40;

export class RowCanvas {
  /**
   * @param {HTMLCanvasElement} canvas
   * @param {Config} config
   * @param {Store} store
   * @param {Derived} derived
   */
  constructor(canvas, config, store, derived) {
    this.canvas = canvas;
    this.config = config;
    this.store = store;
    this.derived = derived;
    this.rows = everyRow(config.ranks);
  }

  get geometry() {
    return geometry(this.rows.list.length);
  }

  /**
   * Draw a frame. Returns the number of visible spans, and the codes of the kinds that were drawn.
   *
   * @param {number} width pixels of the page
   * @param {Frame} frame
   */
  draw(width, { range, zero, rows, selection, mark, measured, theme }) {
    const { canvas, store, derived } = this;
    const { from, to } = range;
    this.rows = rows;
    const bottom = rows.list.length * this.geometry.height;
    const ratio = resizeCanvas(canvas, width, bottom);
    const painter = new Painter(getContext(canvas), ratio, theme);
    painter.context.clearRect(0, 0, canvas.width, canvas.height);
    drawAxis(canvas, theme, ticks(from, to, width, { zero }), { top: 0, bottom, ratio });
    this.#drawRules(painter);
    const pixels = Math.round(width * ratio);
    const places = this.#places(range, pixels, ratio);
    const shares = pixelShares(store, { ...selection, rows, from, to, width: pixels, derived });
    const boxes = this.#labelBoxes(shares.labelled ?? [], places);
    /** @type {Set<number>} */
    const drawn = new Set();
    for (let line = 0; line < 2 * rows.list.length; line++) {
      const runs = shares.pixels.runs(line, MIN_SHARE);
      for (const { kind } of runs) drawn.add(kind);
      this.#drawLane(painter, places, line, runs, boxes[line]);
    }
    this.#drawCells(painter, places, shares.cells);
    if (mark) this.#drawMark(painter, places, mark);
    for (const stretch of measured) this.#drawMeasured(painter, places, stretch);
    return { found: shares.found, drawn };
  }

  /**
   * @param {TimeRange} range
   * @param {number} pixels
   * @param {number} ratio
   * @returns {Places}
   */
  #places({ from, to }, pixels, ratio) {
    const { height, cell, lanes } = this.geometry;
    const scale = pixels / (to - from);
    const band = (/** @type {number} */ lane) => (lane < 0 ? cell : lanes[lane]);
    return {
      left: (time) => (time - from) * scale,
      top: (row, lane) => Math.round((row * height + band(lane)[0]) * ratio),
      height: (lane) => Math.round(band(lane)[1] * ratio),
      pixels,
    };
  }

  /** @param {Painter} painter */
  #drawRules({ context, ratio, theme }) {
    context.fillStyle = theme.of("line");
    for (let row = 1; row < this.rows.list.length; row++) {
      context.fillRect(0, Math.round(row * this.geometry.height * ratio), this.canvas.width, Math.max(1, ratio));
    }
  }

  /**
   * @param {Painter} painter
   * @param {Places} places
   * @param {number} line
   * @param {Run[]} runs
   * @param {LabelBox[]} boxes
   */
  #drawLane(painter, places, line, runs, boxes) {
    const { context, ratio } = painter;
    const lane = line % 2;
    const [top, height] = [places.top(line >> 1, lane), places.height(lane)];
    const { paints } = this.config;
    for (const { kind, left, right } of runs) painter.fill(paints[kind], left, top, right - left, height, lane === 1);
    // A hairline between spans of one kind that follow one another; one of the own code is a part of a larger one.
    for (const { kind, left, right } of boxes) {
      if (left > 0 && right - left > 4 * ratio && paints[kind].kind !== "other")
        context.clearRect(Math.round(left), top, Math.max(1, ratio / 2), height);
    }
    if (height < MIN_LABELLED.height * ratio) return;
    const named = labelRooms(boxes, runs, MIN_LABELLED.width * ratio).filter(({ index, left, right }) => {
      const [code, name] = this.store.labels[this.store.columns.label[index]];
      const { kind, token } = paints[code];
      const words = kind === "wait" ? [] : wordsFor(kind, name, this.store.columns.microbatch[index]);
      return words.some((text) => painter.write(text, left, top, right - left, height, token));
    });
    if (lane) return;
    for (const { kind, left, right } of runs) {
      const [{ form, token }, width] = [paints[kind], right - left];
      if (width < MIN_WAIT_LABELLED * ratio) continue;
      if (form === "wait") painter.write("waits", left, top, width, height - 2 * ratio);
      else if (paints[kind].kind === "other" && !named.some((room) => room.left < right && room.right > left))
        painter.write("own code", left, top, width, height, token);
    }
  }

  /**
   * The boxes of spans in each line, which may be written on.
   *
   * @param {number[]} spans
   * @param {Places} places
   */
  #labelBoxes(spans, { left, pixels }) {
    const { list, rowOf } = this.rows;
    const { start, duration: length, label, rank } = this.store.columns;
    /** @type {LabelBox[][]} */
    const lines = list.flatMap(() => [[], []]);
    for (const index of spans) {
      const kind = this.store.labels[label[index]][0];
      const { lane } = this.config.paints[kind];
      const row = rowOf[rank[index]] ?? -1;
      if (row < 0 || lane < 0 || list[row].ranks.length > 1) continue;
      const [x0, x1] = [Math.max(0, left(start[index])), Math.min(pixels, left(start[index] + length[index]))];
      if (x1 > x0) lines[2 * row + lane].push({ index, kind, left: x0, right: x1 });
    }
    return lines;
  }

  /**
   * @param {Painter} painter
   * @param {Places} places
   * @param {number[]} cells
   */
  #drawCells({ context, theme }, { left, top, height, pixels }, cells) {
    const { start, duration: length, rank } = this.store.columns;
    context.fillStyle = theme.of("kind-other");
    for (const index of cells) {
      const [x0, x1] = [Math.max(0, left(start[index])), Math.min(pixels, left(start[index] + length[index]))];
      const row = this.rows.rowOf[rank[index]];
      if (x1 > x0) context.fillRect(x0, top(row, -1), Math.max(1, x1 - x0), Math.max(1, height(-1) / 2));
    }
  }

  /**
   * @param {Painter} painter
   * @param {Places} places
   * @param {TimeRange} range
   */
  #drawMeasured({ context, ratio, theme }, { left }, { from, to }) {
    context.fillStyle = theme.of("accent");
    context.globalAlpha = 0.14;
    context.fillRect(left(from), 0, left(to) - left(from), this.canvas.height);
    context.globalAlpha = 1;
    for (const time of [from, to]) context.fillRect(left(time) - ratio / 2, 0, ratio, this.canvas.height);
  }

  /**
   * @param {Painter} painter
   * @param {Places} places
   * @param {Mark} mark
   */
  #drawMark({ context, ratio, theme }, places, { row, lane, index }) {
    const [top, height] = [places.top(row, lane) - ratio, places.height(lane) + 2 * ratio];
    context.strokeStyle = theme.ink;
    context.lineWidth = 2 * ratio;
    const { start, duration: length } = this.store.columns;
    const left = index < 0 ? ratio : places.left(start[index]) - ratio;
    const right = index < 0 ? places.pixels - ratio : places.left(start[index] + length[index]) + ratio;
    context.strokeRect(left, top, right - left, height);
  }
}
