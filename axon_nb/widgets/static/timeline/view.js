// @ts-check
// The timeline of `%timeline` on a page: spans by rank, live; pipeline steps next to their ideal.

import { makePairs, showState } from "../shared/card.js";
import { create, setText } from "../shared/dom.js";
import { formatDuration } from "../shared/format.js";
import { patternSwitch } from "../shared/theme.js";
import { rescaleRange, timeAt } from "../shared/time_axis.js";
import { TimeView } from "../shared/time_view.js";
import { sendHeartbeats, subscribe, widget } from "../shared/wire.js";
import { extent, isRunning } from "./blocks.js";
import { Highlight, RowCanvas } from "./canvas.js";
import { Cursor } from "./cursor.js";
import { Derived, familyOf } from "./derived.js";
import { FactsPanel } from "./facts.js";
import { SpanFilter } from "./filter.js";
import { MIN_SPAN, navigate, ownCodeAt, spanAt, visibleRange } from "./layout.js";
import { drawTimeAxis, Overview } from "./overview.js";
import { build, showLegend } from "./page.js";
import { PipelineSteps } from "./steps.js";
import { decode, merge, newStore } from "./store.js";
import { chromeTrace, describe, losses, spanFacts } from "./text.js";

/** @import { Position } from "../shared/pointer.js" */
/** @import { TimeRange } from "../shared/time_axis.js" */
/** @import { Shared } from "../shared/time_view.js" */
/** @import { Context, Model } from "../shared/wire.js" */
/** @import { Zoom } from "./layout.js" */
/** @import { Config, PipelineStep, Store } from "./store.js" */

const REDRAW_MS = 500;

/**
 * One timeline on a page.
 *
 * @extends {TimeView<Store, ReturnType<typeof build>>}
 */
class TimelineView extends TimeView {
  /** @type {Zoom} */
  #zoom = null;
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
    const { canvas, root, overview, figures, notice, facts: table, note } = this.parts;
    this.derived = new Derived(config);
    this.rows = new RowCanvas(canvas, config, this.store, this.derived);
    this.overview = new Overview(overview, this.store, this.derived);
    this.highlight = new Highlight(this.parts.highlight, config, this.store);
    this.facts = new FactsPanel({ figures, notice, table, note }, (words) => this.#showOnly(words));
    this.steps = new PipelineSteps(this.parts.steps, config.paints, this);
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
    this.overview.listen(
      on,
      () => this.range,
      (range) => {
        this.showRange(range);
        this.request();
      },
    );
    on(this.parts.overview, "dblclick", () => this.onKey("a"));
    const { isOn, toggle } = patternSwitch(this.parts.root);
    this.parts.patterns.setAttribute("aria-pressed", String(isOn));
    on(this.parts.patterns, "click", () => this.parts.patterns.setAttribute("aria-pressed", String(toggle())));
  }

  /**
   * Filter by words; or show all spans, if they are the filter already.
   *
   * @param {string} words
   */
  #showOnly(words) {
    const { filter } = this.parts;
    filter.value = filter.value === words ? "" : words;
    this.request();
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
    this.parts.live.textContent = describe(this.store, mark.index, this.config, this.#zero());
    const { canvas, scroll } = this.parts;
    const x = Math.max(0, ((start - this.range.from) / span) * canvas.clientWidth);
    const y = canvas.offsetTop - scroll.scrollTop + mark.row * this.rows.geometry.height;
    const { title, pairs } = spanFacts(this.store, mark.index, this.config, this.#zero());
    this.showText(makePairs(title, pairs), canvas.offsetLeft + x, y);
  }

  #save() {
    const blob = new Blob([JSON.stringify(chromeTrace(this.store, this.config))], { type: "application/json" });
    const link = create("a", "", { href: URL.createObjectURL(blob), download: "timeline.json" });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  /**
   * @param {Position | null} position
   * @param {number} time
   */
  describeAt(position, time) {
    const { geometry } = this.rows;
    const { height, lanes } = geometry;
    const row = position ? Math.floor(position.y / height) : -1;
    const rank = this.config.ranks[row];
    const lane = position && position.y - row * height < lanes[1][0] ? 0 : 1;
    const { range, theme } = this;
    const near = (2 * (range.to - range.from)) / this.parts.canvas.clientWidth;
    const at = { ...this.filter.selection, rank, row, lane, time, near };
    const index = rank === undefined ? -1 : spanAt(this.store, at);
    const family = index < 0 ? [] : familyOf(this.store, index, this.derived.steps);
    this.highlight.show(family, { range, geometry, theme });
    if (index >= 0) {
      const tail = this.derived.tailOf(this.store.first + index);
      const { title, pairs } = spanFacts(this.store, index, this.config, this.#zero(), tail);
      return makePairs(title, pairs);
    }
    const own = lane || rank === undefined ? null : ownCodeAt(this.store, at);
    if (!own) return "";
    const took = formatDuration(own.to - own.from);
    return makePairs("own code", [
      ["rank", String(rank)],
      ["took", took],
    ]);
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
    const { store, theme, range, derived } = this;
    this.filter.update(this.parts.filter.value);
    derived.update(store);
    const { selection } = this.filter;
    const zero = this.#zero();
    const { found, drawn } = this.rows.draw(width, { range, zero, selection, mark: this.cursor.mark, theme });
    const until = store.focus[1] ?? Infinity;
    drawTimeAxis(this.parts.axis, width, { range, zero, until, steps: derived.steps, theme });
    this.overview.draw(width, { whole: this.#whole(range), range, selection, theme });
    if (store.labels.some(([code]) => code === 0)) drawn.add(0);
    showLegend(this.parts.keys, this.config, drawn, store.facts?.shares ?? {});
    this.#drawText(range, found);
    this.facts.show(store.facts);
    if (store.pipelines !== this.#pipelines) {
      this.#pipelines = store.pipelines;
      this.steps.show(this.#pipelines);
    }
  }

  /**
   * What the overview shows: the cell, or everything if the range is not within the cell.
   *
   * @param {TimeRange} range
   */
  #whole(range) {
    const cell = visibleRange(null, this.store, this.shared.now());
    const isInside = range.from >= cell.from - 1e-9 && range.to <= cell.to + 1e-9;
    return this.#zoom !== "all" && isInside ? cell : extent(this.store, this.shared.now());
  }

  /**
   * @param {TimeRange} range
   * @param {number} found number of visible spans
   */
  #drawText({ from, to }, found) {
    const { store, parts } = this;
    const spans = store.count - store.skip;
    const live = this.shared.isDisconnected() ? "lost" : isRunning(store) ? "live" : "idle";
    showState(parts.state, store.finished ? "ended" : live);
    const ranks = `${this.config.ranks.length} rank${this.config.ranks.length === 1 ? "" : "s"}`;
    const count = `${found.toLocaleString("en")} of ${spans.toLocaleString("en")} spans`;
    setText(parts.elapsed, `${ranks} · ${formatDuration(to - from)} · ${count}`);
    setText(parts.losses, losses(store));
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
