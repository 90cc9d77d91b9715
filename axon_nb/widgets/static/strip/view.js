// @ts-check
// The strip of `--watch` on a page.

import { getContext, Painter, resizeCanvas } from "../shared/canvas.js";
import { showState } from "../shared/card.js";
import { setText } from "../shared/dom.js";
import { formatSeconds } from "../shared/format.js";
import { AXIS_HEIGHT, drawAxis, ticks } from "../shared/time_axis.js";
import { TimeView } from "../shared/time_view.js";
import { subscribe, widget } from "../shared/wire.js";
import { navigate, rowHeight, rowMargin, rowRuns, segmentAt, visibleRange } from "./layout.js";
import { build } from "./page.js";
import { decode, describeRows, describeSegment, merge, newAlerts, newStore } from "./store.js";

/** @import { Position } from "../shared/pointer.js" */
/** @import { TimeRange } from "../shared/time_axis.js" */
/** @import { Shared } from "../shared/time_view.js" */
/** @import { Context, Model } from "../shared/wire.js" */
/** @import { Zoom } from "./layout.js" */
/** @import { Config, Store } from "./store.js" */

const REDRAW_MS = 250;
const ANNOUNCE_MS = 5000;
const MIN_MARK_S = 0.01;

/**
 * One strip on a page.
 *
 * @extends {TimeView<Store, ReturnType<typeof build>>}
 */
class StripView extends TimeView {
  /** @type {Zoom} */
  #zoom = null;
  /** @type {Map<number, string>} */
  #announced = new Map();
  #announcedAt = 0;

  /**
   * @param {Context} context
   * @param {Shared<Store>} shared
   */
  constructor({ model, el }, shared) {
    /** @type {Config} */
    const config = model.get("config");
    super(build(config, el), shared, { redrawMs: REDRAW_MS, minRange: MIN_MARK_S });
    this.config = config;
    this.height = rowHeight(config.ranks.length);
  }

  get range() {
    return visibleRange(this.#zoom, this.shared.now(), this.store.finished);
  }

  /** @param {TimeRange} range */
  showRange(range) {
    this.#zoom = range;
  }

  get brushHeight() {
    return this.config.ranks.length * this.height + AXIS_HEIGHT;
  }

  /** @param {string} key */
  onKey(key) {
    const step = navigate(this.#zoom, key, this.shared.now());
    if (!step) return false;
    this.#zoom = step.zoom;
    const { from, to } = this.range;
    this.#announce(`showing ${from.toFixed(1)} to ${to.toFixed(1)} seconds`);
    this.request();
    return true;
  }

  /**
   * @param {Position | null} position
   * @param {number} time
   */
  describeAt(position, time) {
    const { config, store } = this;
    const row = position ? Math.floor((position.y - AXIS_HEIGHT) / this.height) : -1;
    if (row < 0 || row >= config.ranks.length) return "";
    const found = segmentAt(store.rows[row].segments, time, this.shared.now(), config);
    return found ? describeSegment(config.ranks[row], found.segment, found.end, config) : "";
  }

  /** @param {number} width */
  draw(width) {
    const { canvas } = this.parts;
    const now = this.shared.now();
    const { range } = this;
    const bottom = this.config.ranks.length * this.height + AXIS_HEIGHT;
    const ratio = resizeCanvas(canvas, width, bottom);
    getContext(canvas).clearRect(0, 0, canvas.width, canvas.height);
    const marks = ticks(range.from, range.to, width, { minStep: 0.01, minutes: true });
    drawAxis(canvas, this.theme, marks, { top: AXIS_HEIGHT, bottom, ratio });
    this.#drawLegend(this.#drawRows(range, now, ratio));
    this.#drawText(now);
    canvas.ariaLabel ||= `Activity of ${this.config.ranks.length} ranks over time. Plus and minus zoom, arrows move, Home shows everything.`;
    Object.assign(canvas.dataset, {
      segments: this.store.rows.reduce((sum, { segments }) => sum + segments.length, 0),
      now: now.toFixed(2),
      view: `${range.from.toFixed(3)},${range.to.toFixed(3)}`,
    });
    this.#announceAlerts(now);
  }

  /**
   * Draw the rows; returns the activities that were drawn.
   *
   * @param {TimeRange} range
   * @param {number} now
   * @param {number} ratio
   */
  #drawRows(range, now, ratio) {
    const { config, height } = this;
    const { canvas } = this.parts;
    const painter = new Painter(getContext(canvas), ratio, this.theme);
    const drawn = new Set();
    const margin = rowMargin(height);
    this.store.rows.forEach(({ segments }, row) => {
      for (const { kind, left, right } of rowRuns(segments, { ...range, width: canvas.width, now, config })) {
        drawn.add(kind);
        const top = Math.round((AXIS_HEIGHT + row * height + margin) * ratio);
        const boxHeight = Math.max(1, Math.round((height - 2 * margin) * ratio));
        painter.fill(config.paints[kind], left, top, right - left, boxHeight);
      }
    });
    return drawn;
  }

  /** @param {Set<number>} drawn */
  #drawLegend(drawn) {
    for (const kind of drawn) this.parts.keys[kind].hidden = false;
  }

  /** @param {number} now */
  #drawText(now) {
    const { store, parts } = this;
    for (const { item, state, first, last } of parts.rows) {
      item.title = describeRows(store.rows.slice(first, last + 1), now, this.config);
      setText(state, item.title);
    }
    showState(parts.state, store.finished ? "ended" : this.shared.isDisconnected() ? "lost" : "live");
    setText(parts.elapsed, formatSeconds(now));
    const notes = [];
    if (store.coarse) notes.push(`before ${formatSeconds(store.coarse)}, short segments are merged`);
    if (store.lost) notes.push(`${store.lost} sample${store.lost === 1 ? "" : "s"} lost`);
    setText(parts.note, notes.join(" · "));
  }

  /** @param {number} now */
  #announceAlerts(now) {
    if (performance.now() - this.#announcedAt <= ANNOUNCE_MS) return;
    const text = newAlerts(this.store, now, this.config, this.#announced);
    if (text) this.#announce(text);
  }

  /** @param {string} text */
  #announce(text) {
    this.#announcedAt = performance.now();
    this.parts.live.textContent = text;
  }
}

/** @param {{model: Model}} context */
function initialize({ model }) {
  const store = newStore(model.get("config").ranks.length);
  /** @type {Shared<Store>["views"]} */
  const views = new Map();
  const { now, isDisconnected, close } = subscribe(model, store, {
    merge: (message) => merge(store, decode(message)),
    onChange: () => {
      for (const request of views.values()) request();
    },
  });
  return { shared: { store, views, now, isDisconnected }, close };
}

/** @type {(context: Context, shared: Shared<Store>) => () => void} */
const render = (context, shared) => new StripView(context, shared).close;

export default widget(initialize, render);
