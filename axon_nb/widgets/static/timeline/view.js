// @ts-check
// The timeline of `%timeline` on a page: spans by rank, live; pipeline steps next to their ideal.

import { formatDuration } from "../shared/format.js";
import { patternSwitch } from "../shared/theme.js";
import { rescaleRange, timeAt } from "../shared/time_axis.js";
import { TimeView } from "../shared/time_view.js";
import { loadModule, sendHeartbeats, subscribe, widget } from "../shared/wire.js";
import { extent } from "./blocks.js";
import { RowCanvas } from "./canvas.js";
import { Derived } from "./derived.js";
import { FactsPanel, lateRanks } from "./facts.js";
import { SpanFilter } from "./filter.js";
import { MIN_SPAN, navigate, visibleRange } from "./layout.js";
import { drawTimeAxis, Overview } from "./overview.js";
import { build, showLegend, showNames, showStatus } from "./page.js";
import { foldRows } from "./rows.js";
import { decode, merge, newStore } from "./store.js";

/** @import { Position } from "../shared/pointer.js" */
/** @import { TimeRange } from "../shared/time_axis.js" */
/** @import { Shared } from "../shared/time_view.js" */
/** @import { Context, Model } from "../shared/wire.js" */
/** @import { Tools } from "./tools/tools.js" */
/** @import { Zoom } from "./layout.js" */
/** @import { Config, PipelineStep, Store } from "./store.js" */

const REDRAW_MS = 500;
const MAX_BESIDE = 8; // rows; a tooltip below more would be far from the pointer
const SELECTION_KEYS = new Set(["ArrowUp", "ArrowDown", "n", "p", "Enter"]);

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
  /** @type {Set<number>} */
  #openBlocks = new Set();
  #rowsFor = "";
  /** @type {Promise<any> | null} */
  #loading = null;
  /** @type {Tools | null} */
  tools = null;

  /**
   * @param {Context} context
   * @param {Shared<Store>} shared
   */
  constructor({ model, el }, shared) {
    /** @type {Config} */
    const config = model.get("config");
    super(build(config, el), shared, { redrawMs: REDRAW_MS, minRange: MIN_SPAN });
    this.config = config;
    this.model = model;
    const { canvas, root, overview, figures, notice, facts: table, note } = this.parts;
    this.derived = new Derived(config);
    this.rows = foldRows(config.ranks, this.#openBlocks, []);
    this.canvas = new RowCanvas(canvas, config, this.store, this.derived);
    this.overview = new Overview(overview, this.store, this.derived);
    this.facts = new FactsPanel({ figures, notice, table, note }, (words) => this.#showOnly(words));
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
    on(filter, "input", () => {
      this.showText("");
      this.request();
    });
    on(this.parts.root, "pointerenter", () => this.loadTools());
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
   * Show the step in which a rank is late; or filter by words. If that is shown already, show everything.
   *
   * @param {string} words
   */
  #showOnly(words) {
    const [, late] = /^rank:(\d+)$/.exec(words) ?? [];
    if (late) {
      this.loadTools(({ selection }) => {
        this.#zoom = selection.toggleLate(Number(late));
      });
      return;
    }
    const { filter } = this.parts;
    filter.value = filter.value === words ? "" : words;
    this.request();
  }

  /** @param {string} key */
  onKey(key) {
    if (SELECTION_KEYS.has(key) || (key === "Escape" && this.tools?.selection.isOn)) {
      this.loadTools(({ selection }) => selection.onKey(key));
    } else if (key === "save" || key === "picture") {
      this.loadTools(({ saveTrace, savePicture }) => (key === "save" ? saveTrace() : savePicture()));
    } else {
      const step = navigate(this.#zoom, key, this.store, this.shared.now());
      if (!step) return false;
      this.#zoom = step.zoom;
      const { from, to } = this.range;
      const start = (from - this.zero()).toFixed(3);
      this.parts.live.textContent = `showing ${formatDuration(to - from)} from ${start} seconds on`;
    }
    this.request();
    return true;
  }

  /**
   * @param {Position} position
   * @param {number} time
   */
  onClick(position, time) {
    this.loadTools(({ selection }) => selection.onClick(position, time));
  }

  /**
   * @param {TimeRange} range
   * @param {boolean} hasShift
   */
  onMark(range, hasShift) {
    this.loadTools(({ selection }) => selection.onMark(range, hasShift));
  }

  /**
   * @param {Position | null} position
   * @param {number} time
   */
  describeAt(position, time) {
    return this.tools?.selection.describeAt(position, time) ?? "";
  }

  /**
   * Call a function with the tools, which are loaded at their first use.
   *
   * @param {(tools: Tools) => void} use
   */
  async loadTools(use = () => {}) {
    this.#loading ??= loadModule(this.model.get("tools"));
    const { makeTools } = await this.#loading;
    this.tools ??= /** @type {Tools} */ (makeTools(this));
    use(this.tools);
    this.request();
  }

  // ---- the visible range -------------------------------------------------------------------------------------------

  get range() {
    return visibleRange(this.#zoom, this.store, this.shared.now());
  }

  stopFollowing() {
    if (this.#zoom !== "all" && this.#zoom?.follow) this.#zoom = this.range;
  }

  /** @param {TimeRange} range */
  showRange(range) {
    this.#zoom = range;
  }

  get brushHeight() {
    return Math.min(this.rows.list.length * this.canvas.geometry.height, this.parts.scroll.clientHeight);
  }

  /** The time labelled 0. */
  zero = () => this.store.focus[0] ?? extent(this.store, this.shared.now()).from;

  get drawn() {
    return this.filter.selection;
  }

  get geometry() {
    return this.canvas.geometry;
  }

  /**
   * Below or above a few rows, where a tooltip covers none of the calls that are shown together.
   *
   * @param {number} y
   */
  tipPlace(y) {
    const { offsetTop: top, clientHeight } = this.parts.canvas;
    return this.rows.list.length > MAX_BESIDE
      ? super.tipPlace(y)
      : /** @type {[number, number]} */ ([top + clientHeight + 4, top - 4]);
  }

  // ---- drawing -----------------------------------------------------------------------------------------------------

  onAppearanceChange() {
    this.request();
    this.tools?.steps.redraw();
  }

  /** @param {number} width */
  draw(width) {
    const { store, theme, range, derived } = this;
    this.filter.update(this.parts.filter.value);
    derived.update(store);
    this.#foldRows();
    const { selection } = this.filter;
    const zero = this.zero();
    const { mark = null } = this.tools?.selection.cursor ?? {};
    const measured = this.tools?.selection.measured ?? [];
    const { found, drawn } = this.canvas.draw(width, {
      range,
      zero,
      rows: this.rows,
      selection,
      mark,
      measured,
      theme,
    });
    const until = store.focus[1] ?? Infinity;
    drawTimeAxis(this.parts.axis, width, { range, zero, until, steps: derived.steps, theme });
    if (this.tools?.selection.late) this.tools.selection.dim();
    this.overview.draw(width, { whole: this.#whole(range), range, selection, theme });
    if (store.labels.some(([code]) => code === 0)) drawn.add(0);
    showLegend(this.parts.keys, this.config, drawn, store.facts?.shares ?? {});
    showStatus(this.parts, { store, range, found, ranks: this.config.ranks, isLost: this.shared.isDisconnected() });
    this.facts.show(store.facts);
    if (store.pipelines !== this.#pipelines) {
      const steps = store.pipelines;
      this.#pipelines = steps;
      if (steps.length) this.loadTools((tools) => tools.steps.show(steps));
    }
  }

  /** Fold many ranks into groups, except for late ones. */
  #foldRows() {
    const { ranks } = this.config;
    const late = lateRanks(this.store.facts);
    const key = `${late} ${[...this.#openBlocks]}`;
    if (key === this.#rowsFor) return;
    this.#rowsFor = key;
    this.rows = foldRows(ranks, this.#openBlocks, late);
    this.tools?.selection.cursor.clear();
    this.canvas.rows = this.rows;
    this.parts.root.style.setProperty("--axon-row", `${this.canvas.geometry.height}px`);
    showNames(this.parts.names, this.rows, (block) => {
      if (!this.#openBlocks.delete(block)) this.#openBlocks.add(block);
      this.request();
    });
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
