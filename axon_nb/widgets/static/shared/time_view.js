// @ts-check
// What the views of activity over time share: when they are drawn, their keys and buttons, and the pointer.

import { listenUntil } from "./dom.js";
import { showTooltip, trackPointer } from "./pointer.js";
import { onAppearanceChange, readTheme } from "./theme.js";
import { timeAt } from "./time_axis.js";

/** @import { Position } from "./pointer.js" */
/** @import { Theme } from "./theme.js" */
/** @import { TimeRange } from "./time_axis.js" */

const MIN_REDRAW_MS = 200; // between two drawings that only messages request

/**
 * What all pages' views of one widget share.
 *
 * @template Store
 * @typedef {object} Shared
 * @property {Store} store
 * @property {Map<Element, () => void>} views how to request that each is drawn
 * @property {() => number} now the kernel's clock, in seconds
 * @property {() => boolean} isDisconnected whether the kernel no longer sends messages
 */

/**
 * The elements of a view.
 *
 * @typedef {object} TimeParts
 * @property {HTMLElement} root
 * @property {HTMLElement} tools holds the buttons
 * @property {HTMLCanvasElement} canvas
 * @property {HTMLElement} [scroll] scrolls the canvas
 * @property {HTMLElement} brush shows the range that is being marked
 * @property {HTMLElement} tip
 */

/**
 * One view on a page. Subclasses draw it, and change what it shows when a key is pressed.
 *
 * @template {{finished: boolean}} Store
 * @template {TimeParts} Parts
 */
export class TimeView {
  /** @type {Position | null} */
  #pointer = null;
  /** @type {Theme | null} */
  #theme = null;
  #pendingFrame = 0;
  #drawnAt = -Infinity;
  #listeners = new AbortController();

  /**
   * @param {Parts} parts
   * @param {Shared<Store>} shared
   * @param {{redrawMs: number, minRange: number}} options how often time moves on; the least range to mark, in seconds
   */
  constructor(parts, shared, { redrawMs, minRange }) {
    this.parts = parts;
    this.shared = shared;
    this.store = shared.store;
    this.minRange = minRange;
    this.on = listenUntil(this.#listeners.signal);
    this.#listen();
    const { root } = parts;
    const stopObserving = onAppearanceChange(root, () => {
      this.#theme = null;
      this.onAppearanceChange();
    });
    // Time moves on between messages, too, and a rank that falls silent sends none.
    const timer = setInterval(() => !this.store.finished && this.request(), redrawMs);
    shared.views.set(root, this.#onMessage);
    this.request();
    this.close = () => {
      this.#listeners.abort();
      clearInterval(timer);
      cancelAnimationFrame(this.#pendingFrame);
      stopObserving();
      shared.views.delete(root);
    };
  }

  /** The colours now. */
  get theme() {
    this.#theme ??= readTheme(this.parts.root);
    return this.#theme;
  }

  // Messages may come more often than anybody reads; what they brought is drawn at the latest when time moves on.
  #onMessage = () => {
    if (this.store.finished || performance.now() - this.#drawnAt >= MIN_REDRAW_MS) this.request();
  };

  /** Draw in the next frame. */
  request = () => {
    this.#pendingFrame ||= requestAnimationFrame(() => this.#drawIfVisible());
  };

  /**
   * What the view shows now.
   *
   * @returns {TimeRange}
   */
  get range() {
    throw new Error("not implemented");
  }

  /**
   * Show a range from now on.
   *
   * @param {TimeRange} _range
   */
  showRange(_range) {}

  /** Height of the brush, in pixels of the page. */
  get brushHeight() {
    return 0;
  }

  /**
   * Draw the view.
   *
   * @param {number} _width of the canvas, in pixels of the page
   */
  draw(_width) {}

  /**
   * Do what a key or button means; returns whether it has a meaning.
   *
   * @param {string} _key
   */
  onKey(_key) {
    return false;
  }

  /**
   * Handle a range that was marked with the pointer.
   *
   * @param {TimeRange} range
   * @param {boolean} _hasShift whether the shift key was pressed
   */
  onMark(range, _hasShift) {
    this.showRange(range);
  }

  /**
   * Handle a click.
   *
   * @param {Position} _position on the canvas
   * @param {number} _time in seconds
   */
  onClick(_position, _time) {}

  /** Draw again after the size or the theme changed. */
  onAppearanceChange() {
    this.request();
  }

  /**
   * Describe what is below the pointer; empty: nothing.
   *
   * @param {Position | null} _position on the canvas; null: the pointer has left
   * @param {number} _time in seconds
   * @returns {string | Node[]}
   */
  describeAt(_position, _time) {
    return "";
  }

  /**
   * Show a text or nodes next to a place of the page; nothing hides them.
   *
   * @param {string | Node[]} content
   * @param {number} x
   * @param {number} y
   */
  showText = (content, x = 0, y = 0) => {
    showTooltip(this.parts.tip, this.parts.root, content, x + 12, ...this.tipPlace(y));
  };

  /**
   * Where the tooltip of a place begins, and where it ends if there is no room below.
   *
   * @param {number} y of the place
   * @returns {[top: number, bottom: number]}
   */
  tipPlace(y) {
    return [y + 16, y - 8];
  }

  #listen() {
    const { on } = this;
    const { canvas, tools, brush } = this.parts;
    on(canvas, "keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      this.#pointer = null; // what was below it may not be what the key is about
      this.showText("");
      if (!this.onKey(event.key)) return;
      event.preventDefault();
      event.stopPropagation();
    });
    on(tools, "click", ({ target }) => target.tagName === "BUTTON" && this.onKey(target.value));
    on(canvas, "dblclick", () => this.onKey("Home"));
    on(document, "visibilitychange", this.request);
    trackPointer(on, canvas, brush, {
      height: () => this.brushHeight,
      onMove: (position) => {
        this.#pointer = position;
        this.#showTooltip();
      },
      onMark: (left, right, hasShift) => {
        const { range } = this;
        const [from, to] = [timeAt(canvas, range, left), timeAt(canvas, range, right)];
        if (to - from > this.minRange) this.onMark({ from, to }, hasShift);
        this.request();
      },
      onClick: (position) => this.onClick(position, timeAt(canvas, this.range, position.x)),
    });
  }

  #drawIfVisible() {
    this.#pendingFrame = 0;
    this.#drawnAt = performance.now();
    const width = this.parts.canvas.clientWidth;
    if (!width || document.visibilityState === "hidden") return;
    this.draw(width);
    if (this.#pointer) this.#showTooltip();
  }

  #showTooltip() {
    const position = this.#pointer;
    if (!position) {
      this.describeAt(null, 0);
      this.showText("");
      return;
    }
    const { canvas, scroll } = this.parts;
    const x = canvas.offsetLeft + position.x - (scroll?.scrollLeft ?? 0);
    const y = canvas.offsetTop + position.y - (scroll?.scrollTop ?? 0);
    this.showText(this.describeAt(position, timeAt(canvas, this.range, position.x)), x, y);
  }
}
