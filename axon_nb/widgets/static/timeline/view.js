// @ts-check
// The timeline of `%timeline` on a page: spans by rank, live; pipeline steps next to their ideal.

import { create, setText } from "../shared/dom.js";
import { formatDuration } from "../shared/format.js";
import { rescaleRange, timeAt } from "../shared/time_axis.js";
import { TimeView } from "../shared/time_view.js";
import { sendHeartbeats, subscribe, widget } from "../shared/wire.js";
import { RowCanvas } from "./canvas.js";
import { Cursor } from "./cursor.js";
import { SpanFilter } from "./filter.js";
import { MIN_SPAN, navigate, spanAt, visibleRange } from "./layout.js";
import { build, buildFacts, drawLegend } from "./page.js";
import { PipelineSteps } from "./steps.js";
import { decode, extent, isRunning, merge, newStore } from "./store.js";
import { chromeTrace, describe, losses } from "./text.js";

/** @import { Position } from "../shared/pointer.js" */
/** @import { TimeRange } from "../shared/time_axis.js" */
/** @import { Shared } from "../shared/time_view.js" */
/** @import { Context, Model } from "../shared/wire.js" */
/** @import { Zoom } from "./layout.js" */
/** @import { Config, Facts, PipelineStep, Store } from "./store.js" */

const REDRAW_MS = 500;

/**
 * One timeline on a page.
 *
 * @extends {TimeView<Store, ReturnType<typeof build>>}
 */
class TimelineView extends TimeView {
  /** @type {Zoom} */
  #zoom = null;
  /** @type {Facts | null} */
  #facts = null;
  /** @type {PipelineStep[] | null} */
  #pipelines = null;

  /**
   * @param {Context} context
   * @param {Shared<Store>} shared
   */
  constructor({ model, el }, shared) {
    /** @type {Config} */
    const config = model.get("config");
    super(build(config, el), shared, { redrawMs: REDRAW_MS, minRange: MIN_SPAN });
    this.config = config;
    const { canvas, root } = this.parts;
    this.rows = new RowCanvas(canvas, root, config, this.store);
    this.steps = new PipelineSteps(this.parts.steps, config.paints, this.showText);
    this.cursor = new Cursor(this.store, config.ranks);
    this.filter = new SpanFilter(this.store, config);
    this.#listen();
    const { close } = this;
    const stopHeartbeats = sendHeartbeats(model, root, () => !this.store.finished);
    this.close = () => {
      close();
      stopHeartbeats();
    };
  }

  // ---- keys, buttons and the pointer -------------------------------------------------------------------------------

  #listen() {
    const { on } = this;
    const { canvas, filter, keys } = this.parts;
    on(filter, "keydown", (event) => event.stopPropagation()); // Lab has keys of its own
    on(filter, "input", this.request);
    keys.forEach(({ item }, kind) => {
      on(item, "click", () => {
        item.setAttribute("aria-pressed", String(this.filter.toggle(this.config.paints[kind].kind)));
        this.request();
      });
    });
    /** @param {WheelEvent} event */
    const onWheel = (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      const { range } = this;
      const time = timeAt(canvas, range, event.offsetX);
      this.#zoom = rescaleRange(range, event.deltaY < 0 ? 0.8 : 1.25, { minLength: MIN_SPAN, time });
      this.request();
    };
    on(canvas, "wheel", onWheel, { passive: false });
  }

  /** @param {string} key */
  onKey(key) {
    if (key === "ArrowUp" || key === "ArrowDown") {
      this.parts.live.textContent = this.cursor.moveLane(key === "ArrowDown" ? 1 : -1);
    } else if (key === "n" || key === "p") {
      this.#selectSpan(key === "n" ? 1 : -1);
    } else if (key === "Escape" && this.cursor.mark) {
      this.cursor.clear();
      this.showText("");
    } else if (key === "save") {
      this.#save();
    } else {
      const step = navigate(this.#zoom, key, this.store, this.shared.now());
      if (!step) return false;
      this.#zoom = step.zoom;
      const { from, to } = this.range;
      const start = (from - this.#zero()).toFixed(3);
      this.parts.live.textContent = `showing ${formatDuration(to - from)} from ${start} seconds on`;
    }
    this.request();
    return true;
  }

  /** @param {number} direction 1: the next span, -1: the previous one */
  #selectSpan(direction) {
    const { range } = this;
    const { from, to } = range;
    const mark = this.cursor.moveSpan(direction, range, this.filter.selection);
    if (!mark) return;
    const start = this.store.columns.start[mark.index];
    const span = to - from;
    const isVisible = start >= from && start + this.store.columns.duration[mark.index] <= to;
    if (!isVisible) this.#zoom = { from: start - span / 4, to: start + (3 * span) / 4 };
    else if (this.#zoom !== "all" && this.#zoom?.follow) this.#zoom = { from, to }; // so that it stays visible
    const text = describe(this.store, mark.index, this.config, this.#zero());
    this.parts.live.textContent = text;
    const { canvas } = this.parts;
    const x = Math.max(0, ((start - this.range.from) / span) * canvas.clientWidth);
    this.showText(text, canvas.offsetLeft + x, canvas.offsetTop + mark.row * this.rows.geometry.height);
  }

  #save() {
    const blob = new Blob([JSON.stringify(chromeTrace(this.store, this.config))], { type: "application/json" });
    const link = create("a", "", { href: URL.createObjectURL(blob), download: "timeline.json" });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  /**
   * @param {Position} position
   * @param {number} time
   */
  describeAt({ y }, time) {
    const { height, lanes } = this.rows.geometry;
    const row = Math.floor(y / height);
    const rank = this.config.ranks[row];
    if (rank === undefined) return "";
    const lane = y - row * height < lanes[1][0] ? 0 : 1;
    const { from, to } = this.range;
    const near = (2 * (to - from)) / this.parts.canvas.clientWidth;
    const index = spanAt(this.store, { ...this.filter.selection, rank, row, lane, time, near });
    return index < 0 ? "" : describe(this.store, index, this.config, this.#zero());
  }

  // ---- the visible range -------------------------------------------------------------------------------------------

  get range() {
    return visibleRange(this.#zoom, this.store, this.shared.now());
  }

  /** @param {TimeRange} range */
  showRange(range) {
    this.#zoom = range;
  }

  get brushHeight() {
    return Math.min(this.config.ranks.length * this.rows.geometry.height, this.parts.scroll.clientHeight);
  }

  /** The time labelled 0. */
  #zero() {
    return this.store.focus[0] ?? extent(this.store, this.shared.now()).from;
  }

  // ---- drawing -----------------------------------------------------------------------------------------------------

  onAppearanceChange() {
    this.request();
    this.steps.redraw();
  }

  /** @param {number} width */
  draw(width) {
    this.filter.update(this.parts.filter.value);
    const { range } = this;
    const { selection } = this.filter;
    const { found, drawn, ratio } = this.rows.draw(width, {
      range,
      zero: this.#zero(),
      selection,
      mark: this.cursor.mark,
    });
    this.#drawLegend(drawn, ratio);
    this.#drawText(range, found);
    if (this.store.facts && this.store.facts !== this.#facts) {
      this.#facts = this.store.facts;
      this.parts.facts.replaceChildren(...buildFacts(this.#facts));
    }
    if (this.store.pipelines !== this.#pipelines) {
      this.#pipelines = this.store.pipelines;
      this.steps.show(this.#pipelines);
    }
  }

  /**
   * @param {Set<number>} drawn codes of kinds
   * @param {number} ratio
   */
  #drawLegend(drawn, ratio) {
    const { paints } = this.config;
    if (this.store.labels.some(([code]) => code === 0)) drawn.add(0);
    if (this.store.pipelines.length) drawn.add(paints.findIndex((paint) => paint.kind === "bubble"));
    drawLegend(this.parts.keys, paints, drawn, ratio);
  }

  /**
   * @param {TimeRange} range
   * @param {number} found number of visible spans
   */
  #drawText({ from, to }, found) {
    const { store, parts } = this;
    const spans = store.count - store.skip;
    const live = this.shared.isDisconnected() ? " · no news from the kernel" : isRunning(store) ? " · live" : "";
    const state = store.finished ? "" : live;
    const count = `${found.toLocaleString("en")} of ${spans.toLocaleString("en")} spans`;
    setText(parts.elapsed, `${count} in ${formatDuration(to - from)}${state}`);
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
  /** @type {Shared<Store>["views"]} */
  const views = new Map();
  const isShown = () => !document.hidden && [...views.keys()].some((root) => root.isConnected);
  const { now, isDisconnected, close } = subscribe(model, store, {
    merge: (message) => merge(store, decode(message)),
    onMerged: () => {
      if (isShown()) model.send({ op: "ack", number: store.number });
    },
    onChange: () => {
      for (const request of views.values()) request();
    },
  });
  return { shared: { store, views, now, isDisconnected }, close };
}

/** @type {(context: Context, shared: Shared<Store>) => () => void} */
const render = (context, shared) => new TimelineView(context, shared).close;

export default widget(initialize, render);
