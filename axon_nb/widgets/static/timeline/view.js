// @ts-check
// The timeline of `%timeline` on a page: spans by rank, live; pipelines beside their ideal.

import { create, listening, onLook, setText } from "../shared/dom.js";
import { duration } from "../shared/format.js";
import { pointing, showTip } from "../shared/pointer.js";
import { timeAt } from "../shared/time_axis.js";
import { follow, sayHere, widget } from "../shared/wire.js";
import { RowCanvas } from "./canvas.js";
import { Cursor } from "./cursor.js";
import { SpanFilter } from "./filter.js";
import { hit, NARROWEST, navigate, visible, zoomAt } from "./layout.js";
import { build, buildFacts, drawLegend } from "./page.js";
import { PipelineSteps } from "./steps.js";
import { decode, extent, isRunning, merge, newStore } from "./store.js";
import { chromeTrace, describe, losses } from "./text.js";

/** @import { Place } from "../shared/pointer.js" */
/** @import { Stretch } from "../shared/time_axis.js" */
/** @import { Context, Model } from "../shared/wire.js" */
/** @import { View } from "./layout.js" */
/** @import { Config, Facts, PipelineStep, Store } from "./store.js" */

/**
 * What all pages' views of one timeline share.
 *
 * @typedef {object} Shared
 * @property {Store} store
 * @property {Map<Element, () => void>} views how to have each drawn
 * @property {() => number} now
 * @property {() => boolean} gone whether the kernel is
 */

const REDRAW_MS = 500;

/** One timeline on a page. */
class TimelineView {
  /** @type {View} */
  #view = null;
  /** @type {Place | null} */
  #pointer = null;
  #pending = 0;
  /** @type {Facts | null} */
  #facts = null;
  /** @type {PipelineStep[] | null} */
  #pipelines = null;
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
    this.parts = build(this.config, el);
    this.rows = new RowCanvas(this.parts.canvas, this.parts.root, this.config, this.store);
    this.steps = new PipelineSteps(this.parts.steps, this.config.paints, this.#say);
    this.cursor = new Cursor(this.store, this.config.ranks);
    this.filter = new SpanFilter(this.store, this.config);
    this.#listen();
    this.#listenToPointer();
    const { root } = this.parts;
    const unlook = onLook(root, () => {
      this.request();
      this.steps.redraw();
    });
    const unsay = sayHere(model, root, () => !this.store.finished);
    const timer = setInterval(() => !this.store.finished && this.request(), REDRAW_MS);
    shared.views.set(root, this.request);
    this.request();
    this.close = () => {
      this.#stop.abort();
      clearInterval(timer);
      cancelAnimationFrame(this.#pending);
      unlook();
      unsay();
      shared.views.delete(root);
    };
  }

  /** Draw in the next frame. */
  request = () => {
    this.#pending ||= requestAnimationFrame(() => this.#draw());
  };

  /** Show words next to a place of the page; none hides them. */
  #say = (/** @type {string} */ text, x = 0, y = 0) => {
    showTip(this.parts.tip, this.parts.root, text, x + 12, y + 16);
  };

  // ---- keys, buttons and the pointer -------------------------------------------------------------------------------

  #listen() {
    const on = listening(this.#stop.signal);
    const { canvas, filter, tools, keys } = this.parts;
    on(canvas, "keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !this.#go(event.key)) return;
      event.preventDefault();
      event.stopPropagation();
    });
    on(filter, "keydown", (event) => event.stopPropagation()); // Lab has keys of its own
    on(filter, "input", this.request);
    on(tools, "click", ({ target }) => {
      if (target.value === "save") this.#save();
      else if (target.tagName === "BUTTON") this.#go(target.value);
    });
    keys.forEach(({ item }, kind) => {
      on(item, "click", () => {
        item.setAttribute("aria-pressed", String(this.filter.toggle(this.config.paints[kind].kind)));
        this.request();
      });
    });
    on(document, "visibilitychange", this.request);
  }

  #listenToPointer() {
    const on = listening(this.#stop.signal);
    const { canvas, brush, scroll } = this.parts;
    pointing(on, canvas, brush, {
      height: () => Math.min(this.config.ranks.length * this.rows.geometry.height, scroll.clientHeight),
      moved: (place) => {
        this.#pointer = place;
        this.#showTip();
      },
      chose: (left, right) => {
        const stretch = this.#stretch();
        const [from, to] = [timeAt(canvas, stretch, left), timeAt(canvas, stretch, right)];
        if (to - from > NARROWEST) this.#view = { from, to };
        this.request();
      },
    });
    on(canvas, "dblclick", () => this.#go("Home"));
    /** @param {WheelEvent} event */
    const zoom = (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      const stretch = this.#stretch();
      this.#view = zoomAt(stretch, timeAt(canvas, stretch, event.offsetX), event.deltaY < 0 ? 0.8 : 1.25);
      this.request();
    };
    on(canvas, "wheel", zoom, { passive: false });
  }

  /**
   * Do what a key or button means; returns whether it has a meaning.
   *
   * @param {string} key
   */
  #go(key) {
    if (key === "ArrowUp" || key === "ArrowDown") {
      this.parts.live.textContent = this.cursor.moveLane(key === "ArrowDown" ? 1 : -1);
    } else if (key === "n" || key === "p") {
      this.#chooseSpan(key === "n" ? 1 : -1);
    } else if (key === "Escape" && this.cursor.mark) {
      this.cursor.clear();
      this.#say("");
    } else {
      const step = navigate(this.#view, key, this.store, this.shared.now());
      if (!step) return false;
      this.#view = step.view;
      const { from, to } = this.#stretch();
      const begin = (from - this.#zero()).toFixed(3);
      this.parts.live.textContent = `showing ${duration(to - from)} from ${begin} seconds on`;
    }
    this.request();
    return true;
  }

  /** @param {number} way 1: the next span, -1: the one before */
  #chooseSpan(way) {
    const stretch = this.#stretch();
    const { from, to } = stretch;
    const mark = this.cursor.moveSpan(way, stretch, this.filter.selection);
    if (!mark) return;
    const at = this.store.columns.start[mark.index];
    const span = to - from;
    const inSight = at >= from && at + this.store.columns.duration[mark.index] <= to;
    if (!inSight) this.#view = { from: at - span / 4, to: at + (3 * span) / 4 };
    else if (this.#view !== "all" && this.#view?.follow) this.#view = { from, to }; // so that it stays in sight
    const words = describe(this.store, mark.index, this.config, this.#zero());
    this.parts.live.textContent = words;
    const { canvas } = this.parts;
    const x = Math.max(0, ((at - this.#stretch().from) / span) * canvas.clientWidth);
    this.#say(words, canvas.offsetLeft + x, canvas.offsetTop + mark.row * this.rows.geometry.height);
  }

  #save() {
    const blob = new Blob([JSON.stringify(chromeTrace(this.store, this.config))], { type: "application/json" });
    const link = create("a", "", { href: URL.createObjectURL(blob), download: "timeline.json" });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  #showTip() {
    if (!this.#pointer) {
      this.#say("");
      return;
    }
    const { x, y } = this.#pointer;
    const { canvas, scroll } = this.parts;
    const { height, lanes } = this.rows.geometry;
    const row = Math.floor(y / height);
    const lane = y - row * height < lanes[1][0] ? 0 : 1;
    const stretch = this.#stretch();
    const near = (2 * (stretch.to - stretch.from)) / canvas.clientWidth;
    const rank = this.config.ranks[row];
    const time = timeAt(canvas, stretch, x);
    const found = rank === undefined ? -1 : hit(this.store, { ...this.filter.selection, rank, row, lane, time, near });
    const words = found < 0 ? "" : describe(this.store, found, this.config, this.#zero());
    this.#say(words, canvas.offsetLeft + x - scroll.scrollLeft, canvas.offsetTop + y - scroll.scrollTop);
  }

  // ---- what is on show ---------------------------------------------------------------------------------------------

  #stretch() {
    return visible(this.#view, this.store, this.shared.now());
  }

  /** The time that is labelled 0. */
  #zero() {
    return this.store.focus[0] ?? extent(this.store, this.shared.now()).from;
  }

  // ---- drawing -----------------------------------------------------------------------------------------------------

  #draw() {
    this.#pending = 0;
    const width = Math.floor(this.parts.canvas.clientWidth);
    if (!width || document.visibilityState === "hidden") return;
    this.filter.update(this.parts.filter.value);
    const stretch = this.#stretch();
    const { selection } = this.filter;
    const frame = { stretch, zero: this.#zero(), selection, mark: this.cursor.mark };
    const drawn = this.rows.draw(width, frame);
    this.#drawLegend(drawn.seen, drawn.ratio);
    this.#drawWords(stretch, drawn.found);
    if (this.store.facts && this.store.facts !== this.#facts) {
      this.#facts = this.store.facts;
      this.parts.facts.replaceChildren(...buildFacts(this.#facts));
    }
    if (this.store.pipelines !== this.#pipelines) {
      this.#pipelines = this.store.pipelines;
      this.steps.show(this.#pipelines);
    }
    if (this.#pointer) this.#showTip();
  }

  /**
   * @param {Set<number>} seen codes of kinds
   * @param {number} ratio
   */
  #drawLegend(seen, ratio) {
    const { paints } = this.config;
    if (this.store.labels.some(([code]) => code === 0)) seen.add(0);
    if (this.store.pipelines.length) seen.add(paints.findIndex((paint) => paint.kind === "bubble"));
    drawLegend(this.parts.keys, paints, seen, ratio);
  }

  /**
   * @param {Stretch} stretch
   * @param {number} found number of spans in sight
   */
  #drawWords({ from, to }, found) {
    const { store, parts } = this;
    const spans = store.count - store.skip;
    const live = this.shared.gone() ? " · no news from the kernel" : isRunning(store) ? " · live" : "";
    const state = store.finished ? "" : live;
    const count = `${found.toLocaleString("en")} of ${spans.toLocaleString("en")} spans`;
    setText(parts.elapsed, `${count} in ${duration(to - from)}${state}`);
    setText(parts.note, losses(store));
    const { canvas } = parts;
    const label = `Timeline of ${this.config.ranks.length} ranks. Plus and minus zoom, left and right move, up and down choose a rank, n and p go from span to span, Home shows the last cell, a everything.`;
    if (canvas.ariaLabel !== label) canvas.ariaLabel = label;
    const view = `${from.toFixed(6)},${to.toFixed(6)}`;
    Object.assign(canvas.dataset, { spans, found, updates: store.updates, end: store.first + store.count, view });
  }
}

/** @param {{model: Model}} context */
function initialize({ model }) {
  const store = newStore();
  /** @type {Shared["views"]} */
  const views = new Map();
  const seen = () => !document.hidden && [...views.keys()].some((root) => root.isConnected);
  const { now, gone, close } = follow(model, store, {
    take: (message) => merge(store, decode(message)),
    took: () => {
      if (seen()) model.send({ op: "seen", number: store.number });
    },
    changed: () => {
      for (const request of views.values()) request();
    },
  });
  return { shared: { store, views, now, gone }, close };
}

export default widget(initialize, (context, /** @type {Shared} */ shared) => new TimelineView(context, shared).close);
