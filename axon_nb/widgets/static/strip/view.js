// @ts-check
// The strip of `--watch` on a page.

import { contextOf, drawSwatch, fit, Painter } from "../shared/canvas.js";
import { listening, onLook, setText } from "../shared/dom.js";
import { seconds } from "../shared/format.js";
import { pointing, showTip } from "../shared/pointer.js";
import { AXIS_HEIGHT, drawAxis, ticks, timeAt } from "../shared/time_axis.js";
import { follow, widget } from "../shared/wire.js";
import { hit, navigate, rowHeight, rowRuns, visible } from "./layout.js";
import { build } from "./page.js";
import { decode, describe, explain, merge, newStore, news } from "./store.js";

/** @import { Place } from "../shared/pointer.js" */
/** @import { Stretch } from "../shared/time_axis.js" */
/** @import { Context, Model } from "../shared/wire.js" */
/** @import { View } from "./layout.js" */
/** @import { Config, Store } from "./store.js" */

/**
 * What all pages' views of one strip share.
 *
 * @typedef {object} Shared
 * @property {Store} store
 * @property {Set<() => void>} views how to have each drawn
 * @property {() => number} now
 * @property {() => boolean} gone whether the kernel is
 */

const REDRAW_MS = 250;
const ANNOUNCE_MS = 5000;
const NARROWEST_MARK = 0.01; // seconds

/** One strip on a page. */
class StripView {
  /** @type {View} */
  #view = null;
  /** @type {Place | null} */
  #pointer = null;
  /** @type {Map<number, string>} */
  #announced = new Map();
  #announcedAt = 0;
  #pending = 0;
  #stop = new AbortController();

  /**
   * @param {Context} context
   * @param {Shared} shared
   */
  constructor({ model, el }, shared) {
    /** @type {Config} */
    this.config = model.get("config");
    this.shared = shared;
    this.store = shared.store;
    this.height = rowHeight(this.config.ranks.length);
    this.parts = build(this.config, el);
    this.#listen();
    const unlook = onLook(this.parts.root, this.request);
    // Bars and waits grow between messages too, and a rank that falls silent sends none.
    const timer = setInterval(() => !this.store.finished && this.request(), REDRAW_MS);
    shared.views.add(this.request);
    this.request();
    this.close = () => {
      this.#stop.abort();
      clearInterval(timer);
      cancelAnimationFrame(this.#pending);
      unlook();
      shared.views.delete(this.request);
    };
  }

  /** Draw in the next frame. */
  request = () => {
    this.#pending ||= requestAnimationFrame(() => this.#draw());
  };

  #listen() {
    const on = listening(this.#stop.signal);
    const { canvas, tools, brush } = this.parts;
    on(canvas, "keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !this.#go(event.key)) return;
      event.preventDefault();
      event.stopPropagation();
    });
    on(tools, "click", (event) => event.target.value && this.#go(event.target.value));
    pointing(on, canvas, brush, {
      height: () => this.config.ranks.length * this.height,
      moved: (place) => {
        this.#pointer = place;
        this.#showTip();
      },
      chose: (left, right) => {
        const stretch = this.#stretch();
        const [from, to] = [timeAt(canvas, stretch, left), timeAt(canvas, stretch, right)];
        if (to - from > NARROWEST_MARK) this.#view = { from, to };
        this.request();
      },
    });
    on(canvas, "dblclick", () => this.#go("Home"));
    on(document, "visibilitychange", this.request);
  }

  #stretch() {
    return visible(this.#view, this.shared.now());
  }

  #draw() {
    this.#pending = 0;
    const { canvas, root } = this.parts;
    const width = canvas.clientWidth;
    if (!width || document.visibilityState === "hidden") return;
    const now = this.shared.now();
    const stretch = visible(this.#view, now);
    const bottom = this.config.ranks.length * this.height;
    const ratio = fit(canvas, width, bottom + AXIS_HEIGHT);
    contextOf(canvas).clearRect(0, 0, canvas.width, canvas.height);
    drawAxis(canvas, root, ticks(stretch.from, stretch.to, width, { finest: 0.01, minutes: true }), { bottom, ratio });
    this.#drawLegend(this.#drawRows(stretch, now, ratio));
    this.#drawWords(now);
    canvas.ariaLabel ||= `Activity of ${this.config.ranks.length} ranks over time. Plus and minus zoom, arrows move, Home shows everything.`;
    Object.assign(canvas.dataset, {
      segments: this.store.rows.reduce((sum, { segments }) => sum + segments.length, 0),
      now: now.toFixed(2),
      view: `${stretch.from.toFixed(3)},${stretch.to.toFixed(3)}`,
    });
    this.#announce(now);
    if (this.#pointer) this.#showTip();
  }

  /**
   * Draw what ranks do; returns which activities there are.
   *
   * @param {Stretch} stretch
   * @param {number} now
   * @param {number} ratio
   */
  #drawRows(stretch, now, ratio) {
    const { config, height } = this;
    const { canvas } = this.parts;
    const painter = new Painter(contextOf(canvas), ratio);
    const seen = new Set();
    this.store.rows.forEach(({ segments }, row) => {
      for (const { kind, left, right } of rowRuns(segments, { ...stretch, width: canvas.width, now, config })) {
        seen.add(kind);
        const [top, tall] = [Math.round((row * height + 3) * ratio), Math.round((height - 6) * ratio)];
        painter.fill(config.paints[kind], left, top, right - left, tall);
      }
    });
    return seen;
  }

  /** @param {Set<number>} seen */
  #drawLegend(seen) {
    this.parts.swatches.forEach(({ item, canvas }, kind) => {
      if (item.hidden && !seen.has(kind)) return;
      item.hidden = false;
      drawSwatch(canvas, this.config.paints[kind]);
    });
  }

  /** @param {number} now */
  #drawWords(now) {
    const { store, parts } = this;
    store.rows.forEach(({ segments }, row) => {
      const { item, words } = parts.rows[row];
      item.title = describe(segments, now, this.config);
      setText(words, item.title);
    });
    const prefix = store.finished ? "ended after " : this.shared.gone() ? "no news from the kernel since " : "";
    setText(parts.elapsed, prefix + seconds(now));
    const notes = [];
    if (store.coarse) notes.push(`before ${seconds(store.coarse)} short stretches are merged`);
    if (store.lost) notes.push(`${store.lost} sample${store.lost === 1 ? "" : "s"} lost`);
    setText(parts.note, notes.join(" · "));
  }

  /** @param {number} now */
  #announce(now) {
    if (performance.now() - this.#announcedAt <= ANNOUNCE_MS) return;
    const text = news(this.store, now, this.config, this.#announced);
    if (text) this.#say(text);
  }

  /** @param {string} text */
  #say(text) {
    this.#announcedAt = performance.now();
    this.parts.live.textContent = text;
  }

  /**
   * Do what a key or button means; returns whether it has a meaning.
   *
   * @param {string} key
   */
  #go(key) {
    const step = navigate(this.#view, key, this.shared.now());
    if (!step) return false;
    this.#view = step.view;
    const { from, to } = this.#stretch();
    this.#say(`showing ${from.toFixed(1)} to ${to.toFixed(1)} seconds`);
    this.request();
    return true;
  }

  #showTip() {
    const { root, canvas, tip } = this.parts;
    const { config } = this;
    const pointer = this.#pointer;
    const row = pointer ? Math.floor(pointer.y / this.height) : config.ranks.length;
    if (!pointer || row >= config.ranks.length) {
      showTip(tip, root, "");
      return;
    }
    const time = timeAt(canvas, this.#stretch(), pointer.x);
    const found = hit(this.store.rows[row].segments, time, this.shared.now(), config);
    const text = found ? explain(config.ranks[row], found.segment, found.end, config) : "";
    showTip(tip, root, text, canvas.offsetLeft + pointer.x + 12, canvas.offsetTop + pointer.y + 14);
  }
}

/** @param {{model: Model}} context */
function initialize({ model }) {
  const store = newStore(model.get("config").ranks.length);
  /** @type {Shared["views"]} */
  const views = new Set();
  const { now, gone, close } = follow(model, store, {
    take: (message) => merge(store, decode(message)),
    changed: () => {
      for (const request of views) request();
    },
  });
  return { shared: { store, views, now, gone }, close };
}

export default widget(initialize, (context, /** @type {Shared} */ shared) => new StripView(context, shared).close);
