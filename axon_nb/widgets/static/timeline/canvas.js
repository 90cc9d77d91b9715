// @ts-check
// The rows of a timeline on their canvas.

import { getContext, Painter, resizeCanvas } from "../shared/canvas.js";
import { AXIS_HEIGHT, drawAxis, ticks } from "../shared/time_axis.js";
import { geometry, MIN_SHARE, pixelShares } from "./layout.js";

/** @import { TimeRange } from "../shared/time_axis.js" */
/** @import { Mark } from "./cursor.js" */
/** @import { SpanSelection } from "./filter.js" */
/** @import { Config, Store } from "./store.js" */

/** @typedef {{index: number, left: number, top: number, width: number, height: number}} Box of a span, device pixels */

/**
 * What is drawn at once.
 *
 * @typedef {object} Frame
 * @property {TimeRange} range
 * @property {number} zero the time labelled 0
 * @property {SpanSelection} selection which spans are drawn
 * @property {Mark | null} mark
 */

const MIN_LABELLED = { width: 26, height: 10 }; // of a box that is written on, in pixels of the page

export class RowCanvas {
  /** @type {Painter | null} */
  #painter = null;
  /** @type {Map<number, number>} */
  #rowOf;

  /**
   * @param {HTMLCanvasElement} canvas
   * @param {Element} root the view, whose font and colours it takes
   * @param {Config} config
   * @param {Store} store
   */
  constructor(canvas, root, config, store) {
    this.canvas = canvas;
    this.root = root;
    this.config = config;
    this.store = store;
    this.geometry = geometry(config.ranks.length);
    this.#rowOf = new Map(config.ranks.map((rank, row) => [rank, row]));
  }

  /**
   * Draw a frame. Returns the number of visible spans, and the codes of the kinds that were drawn.
   *
   * @param {number} width pixels of the page
   * @param {Frame} frame
   */
  draw(width, { range, zero, selection, mark }) {
    const { canvas, config, store } = this;
    const { from, to } = range;
    const bottom = config.ranks.length * this.geometry.height;
    const ratio = resizeCanvas(canvas, width, bottom + AXIS_HEIGHT);
    const painter = this.#painterFor(ratio);
    painter.context.clearRect(0, 0, canvas.width, canvas.height);
    drawAxis(canvas, this.root, ticks(from, to, width, { zero }), { bottom, ratio });
    const pixels = Math.round(width * ratio);
    const shares = pixelShares(store, { ...selection, from, to, width: pixels });
    const drawn = this.#drawLanes(painter, shares.pixels);
    this.#drawCells(painter, shares.cells, range, pixels);
    if (shares.labelled) this.#drawLabels(painter, shares.labelled, range, pixels);
    if (mark) this.#drawMark(painter, mark, range, pixels);
    return { found: shares.found, drawn, ratio };
  }

  /** @param {number} ratio */
  #painterFor(ratio) {
    if (this.#painter?.ratio !== ratio) this.#painter = new Painter(getContext(this.canvas), ratio);
    return this.#painter;
  }

  /**
   * @param {Painter} painter
   * @param {ReturnType<typeof pixelShares>["pixels"]} pixels
   */
  #drawLanes(painter, pixels) {
    const { ratio } = painter;
    const { height, lanes } = this.geometry;
    /** @type {Set<number>} */
    const drawn = new Set();
    for (let line = 0; line < 2 * this.config.ranks.length; line++) {
      const [offset, laneHeight] = lanes[line % 2];
      const top = Math.round(((line >> 1) * height + offset) * ratio);
      for (const { kind, left, right } of pixels.runs(line, MIN_SHARE)) {
        drawn.add(kind);
        painter.fill(this.config.paints[kind], left, top, right - left, Math.round(laneHeight * ratio));
      }
    }
    return drawn;
  }

  /**
   * @param {Painter} painter
   * @param {number[]} cells
   * @param {TimeRange} range
   * @param {number} pixels
   */
  #drawCells({ context, ratio }, cells, range, pixels) {
    context.fillStyle = this.config.paints[0].color;
    for (const box of this.#boxes(cells, range, pixels, ratio)) {
      context.fillRect(box.left, box.top, Math.max(1, box.width), box.height);
    }
  }

  /**
   * @param {Painter} painter
   * @param {number[]} spans
   * @param {TimeRange} range
   * @param {number} pixels
   */
  #drawLabels(painter, spans, range, pixels) {
    const { ratio } = painter;
    const { columns, labels } = this.store;
    for (const { index, left, top, width, height } of this.#boxes(spans, range, pixels, ratio)) {
      if (width < MIN_LABELLED.width * ratio || height < MIN_LABELLED.height * ratio) continue;
      const [, name] = labels[columns.label[index]];
      const text = columns.stage[index] >= 0 ? `${name} ${columns.microbatch[index]}` : name;
      painter.write(text, left, top, width, height);
    }
  }

  /**
   * @param {Painter} painter
   * @param {Mark} mark
   * @param {TimeRange} range
   * @param {number} pixels
   */
  #drawMark({ context, ratio }, { row, lane, index }, { from, to }, pixels) {
    const { height, lanes } = this.geometry;
    const [offset, laneHeight] = lanes[lane];
    const top = (row * height + offset) * ratio;
    context.strokeStyle = getComputedStyle(this.root).color;
    context.lineWidth = 2 * ratio;
    if (index < 0) {
      context.strokeRect(ratio, top - ratio, pixels - 2 * ratio, (laneHeight + 2) * ratio);
      return;
    }
    const { start, duration: length } = this.store.columns;
    const scale = pixels / (to - from);
    const left = (start[index] - from) * scale - ratio;
    context.strokeRect(left, top - ratio, length[index] * scale + 2 * ratio, (laneHeight + 2) * ratio);
  }

  /**
   * The boxes of the spans that are visible.
   *
   * @param {number[]} spans
   * @param {TimeRange} range
   * @param {number} pixels
   * @param {number} ratio
   * @returns {Generator<Box>}
   */
  *#boxes(spans, { from, to }, pixels, ratio) {
    const { start, duration: length, label, rank } = this.store.columns;
    const { height, cell, lanes } = this.geometry;
    const scale = pixels / (to - from);
    for (const index of spans) {
      const { lane } = this.config.paints[this.store.labels[label[index]][0]];
      const left = Math.max(0, (start[index] - from) * scale);
      const right = Math.min(pixels, (start[index] + length[index] - from) * scale);
      if (right <= 0 || left >= pixels) continue;
      const [offset, laneHeight] = lane < 0 ? cell : lanes[lane];
      const top = ((this.#rowOf.get(rank[index]) ?? 0) * height + offset) * ratio;
      yield { index, left, width: right - left, top, height: laneHeight * ratio };
    }
  }
}
