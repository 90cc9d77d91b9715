// @ts-check
// Drawing on canvases with paints: a colour and a form.

import { inkOn } from "./theme.js";

/** @import { Theme } from "./theme.js" */

/**
 * @typedef {object} Paint
 * @property {string} token name of its colour, see `Theme`
 * @property {string} form `solid`, `wait` (pale, with a line at its foot), `line`, `hollow`, `bubble` or `cross`
 */

/** @type {Record<string, number[][]>} */
const PATTERNS = {
  "kind-backward": [
    [0, 2, 8, 2],
    [0, 6, 8, 6],
  ],
  "kind-optimizer": [
    [0, 0, 8, 8],
    [8, 0, 0, 8],
  ],
  "kind-collective": [
    [1.5, 0, 1.5, 8],
    [5.5, 0, 5.5, 8],
  ],
  "kind-p2p": [
    [1, 2, 3, 2],
    [5, 6, 7, 6],
  ],
  "kind-wait": [
    [-2, 2, 2, -2],
    [0, 8, 8, 0],
    [6, 10, 10, 6],
  ],
  "kind-other": [[0, 4, 8, 4]],
};
/** Lines over colours, drawn only if patterns are on; forward has none. */
const MIN_ROUNDED = 6; // pixels of the page
const RADIUS = 2;
const FOOT = 2;

/**
 * The 2D context of a canvas.
 *
 * @param {HTMLCanvasElement} canvas
 */
export function getContext(canvas) {
  return /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
}

/**
 * Set a canvas's size, in pixels of the page. Returns the device pixels per pixel.
 *
 * @param {HTMLCanvasElement} canvas
 * @param {number} width
 * @param {number} height
 */
export function resizeCanvas(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(height * ratio))];
  if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
  canvas.style.height = `${height}px`;
  return ratio;
}

/** Fills boxes of a canvas with paints. All lengths are in device pixels; `ratio` of them are one pixel of the page. */
export class Painter {
  /** @type {Record<string, CanvasPattern | null>} */
  #patterns = {};

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {number} ratio
   * @param {Theme} theme
   */
  constructor(context, ratio, theme) {
    this.context = context;
    this.ratio = ratio;
    this.theme = theme;
  }

  /**
   * @param {Paint} paint
   * @param {number} left
   * @param {number} top
   * @param {number} width
   * @param {number} height
   * @param {boolean} isQuiet whether waiting is its foot alone
   */
  fill({ token, form }, left, top, width, height, isQuiet = false) {
    const { context, ratio, theme } = this;
    context.fillStyle = context.strokeStyle = theme.of(token);
    context.lineWidth = ratio;
    if (form === "wait") {
      this.#fillWaiting(token, left, top, width, height, isQuiet);
    } else if (form === "line") {
      context.fillRect(left, top + height / 2 - ratio, width, 2 * ratio);
    } else if (form === "bubble") {
      context.globalAlpha = 0.3;
      context.fillRect(left, top + height / 2 - ratio / 2, width, ratio);
      context.globalAlpha = 1;
    } else if (form === "hollow" || form === "cross") {
      const inset = Math.round(height / 5);
      context.strokeRect(left + ratio / 2, top + inset, Math.max(0, width - ratio), height - 2 * inset);
      if (form === "cross") context.fillRect(left, top + height / 2 - ratio, width, 2 * ratio);
    } else {
      this.#fillBox(left, top, width, height);
      if (theme.patterns) this.#cover(token, left, top, width, height);
    }
  }

  /**
   * @param {string} token
   * @param {number} left
   * @param {number} top
   * @param {number} width
   * @param {number} height
   * @param {boolean} isQuiet
   */
  #fillWaiting(token, left, top, width, height, isQuiet) {
    const { context, ratio, theme } = this;
    if (!isQuiet) {
      context.fillStyle = theme.of(`${token}-soft`);
      context.fillRect(left, top, width, height);
      if (theme.patterns) this.#cover(token, left, top, width, height);
      context.fillStyle = theme.of(token);
    }
    context.fillRect(left, top + height - FOOT * ratio, width, FOOT * ratio);
  }

  /**
   * @param {number} left
   * @param {number} top
   * @param {number} width
   * @param {number} height
   */
  #fillBox(left, top, width, height) {
    const { context, ratio } = this;
    if (width < MIN_ROUNDED * ratio) {
      context.fillRect(left, top, width, height);
      return;
    }
    context.beginPath();
    context.roundRect(left, top, width, height, RADIUS * ratio);
    context.fill();
  }

  /**
   * Write text centered in a box, if it fits; returns whether it does.
   *
   * @param {string} text
   * @param {number} left
   * @param {number} top
   * @param {number} width
   * @param {number} height
   * @param {string} [token] of the colour behind it; by default the text is secondary text on the page
   */
  write(text, left, top, width, height, token) {
    const { context, ratio, theme } = this;
    context.font = `${Math.min(11, height / ratio - 2) * ratio}px ${theme.font}`;
    if (context.measureText(text).width > width - 6 * ratio) return false;
    Object.assign(context, { textAlign: "center", textBaseline: "middle" });
    context.fillStyle = token ? inkOn(theme.of(token)) : theme.of("muted");
    context.fillText(text, left + width / 2, top + height / 2 + ratio / 2);
    return true;
  }

  /**
   * Draw a colour's pattern over a box.
   *
   * @param {string} token
   * @param {number} left
   * @param {number} top
   * @param {number} width
   * @param {number} height
   */
  #cover(token, left, top, width, height) {
    if (!PATTERNS[token]) return;
    this.#patterns[token] ??= this.#makePattern(PATTERNS[token], token);
    this.context.fillStyle = /** @type {CanvasPattern} */ (this.#patterns[token]);
    this.context.fillRect(left, top, width, height);
  }

  /**
   * @param {number[][]} lines
   * @param {string} token
   */
  #makePattern(lines, token) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = Math.round(8 * this.ratio);
    const pen = getContext(tile);
    pen.scale(tile.width / 8, tile.height / 8);
    pen.strokeStyle = token === "kind-wait" ? this.theme.of(token) : inkOn(this.theme.of(token));
    pen.globalAlpha = 0.6;
    pen.lineWidth = 1.2;
    for (const [x0, y0, x1, y1] of lines) {
      pen.beginPath();
      pen.moveTo(x0, y0);
      pen.lineTo(x1, y1);
      pen.stroke();
    }
    return this.context.createPattern(tile, "repeat");
  }
}
