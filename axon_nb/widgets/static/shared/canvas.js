// @ts-check
// Drawing on canvases with paints: a colour and a pattern.

/**
 * @typedef {object} Paint
 * @property {string} color hex RGB
 * @property {string} pattern a key of `PATTERNS`, or `solid`, `line`, `hollow`, `dashed`
 * @property {boolean} outline whether boxes get a grey edge, as the colour is near that of the page
 */

/** @type {Record<string, {color: string, width: number, paths: number[][]}>} */
const PATTERNS = {
  rows: {
    color: "rgba(255,255,255,.75)",
    width: 1,
    paths: [
      [0, 2, 8, 2],
      [0, 6, 8, 6],
    ],
  },
  bars: {
    color: "rgba(255,255,255,.45)",
    width: 1,
    paths: [
      [1.5, 0, 1.5, 8],
      [5.5, 0, 5.5, 8],
    ],
  },
  dots: {
    color: "rgba(17,17,17,.7)",
    width: 2,
    paths: [
      [1, 2, 3, 2],
      [5, 6, 7, 6],
    ],
  },
  hatch: {
    color: "rgba(17,17,17,.65)",
    width: 1.5,
    paths: [
      [-2, 2, 2, -2],
      [0, 8, 8, 0],
      [6, 10, 10, 6],
    ],
  },
  cross: {
    color: "rgba(255,255,255,.6)",
    width: 1.3,
    paths: [
      [0, 0, 8, 8],
      [8, 0, 0, 8],
    ],
  },
};

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
   */
  constructor(context, ratio) {
    this.context = context;
    this.ratio = ratio;
  }

  /**
   * @param {Paint} paint
   * @param {number} left
   * @param {number} top
   * @param {number} width
   * @param {number} height
   */
  fill(paint, left, top, width, height) {
    const { context, ratio } = this;
    context.fillStyle = context.strokeStyle = paint.color;
    context.lineWidth = ratio;
    if (paint.pattern === "line") {
      context.fillRect(left, top + height / 2 - ratio, width, 2 * ratio);
      return;
    }
    if (paint.pattern === "hollow" || paint.pattern === "dashed") {
      const inset = paint.pattern === "hollow" ? Math.round(height / 5) : ratio / 2;
      if (paint.pattern === "dashed") context.setLineDash([2 * ratio, 2 * ratio]);
      context.strokeRect(left + ratio / 2, top + inset, Math.max(0, width - ratio), height - 2 * inset);
      context.setLineDash([]);
      return;
    }
    context.fillRect(left, top, width, height);
    const pattern = this.#patternOf(paint.pattern);
    if (pattern) {
      context.fillStyle = pattern;
      context.fillRect(left, top, width, height);
    }
    if (paint.outline && width > 3 * ratio) {
      context.strokeStyle = "#767676";
      context.strokeRect(left + ratio / 2, top + ratio / 2, width - ratio, height - ratio);
    }
  }

  /**
   * Write text centered in a box, if it fits.
   *
   * @param {string} text
   * @param {number} left
   * @param {number} top
   * @param {number} width
   * @param {number} height
   */
  write(text, left, top, width, height) {
    const { context, ratio } = this;
    context.font = `${Math.min(11, height / ratio - 2) * ratio}px sans-serif`;
    if (context.measureText(text).width > width - 4 * ratio) return;
    Object.assign(context, { textAlign: "center", textBaseline: "middle", lineWidth: 2.5 * ratio, lineJoin: "round" });
    context.strokeStyle = "#222";
    context.strokeText(text, left + width / 2, top + height / 2 + ratio / 2);
    context.fillStyle = "#fff";
    context.fillText(text, left + width / 2, top + height / 2 + ratio / 2);
  }

  /** @param {string} name */
  #patternOf(name) {
    if (!PATTERNS[name]) return null;
    this.#patterns[name] ??= this.#makePattern(PATTERNS[name]);
    return this.#patterns[name];
  }

  /** @param {{color: string, width: number, paths: number[][]}} lines */
  #makePattern({ color, width, paths }) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = Math.round(8 * this.ratio);
    const pen = getContext(tile);
    pen.scale(tile.width / 8, tile.height / 8);
    pen.strokeStyle = color;
    pen.lineWidth = width;
    for (const [x0, y0, x1, y1] of paths) {
      pen.beginPath();
      pen.moveTo(x0, y0);
      pen.lineTo(x1, y1);
      pen.stroke();
    }
    return this.context.createPattern(tile, "repeat");
  }
}

/**
 * Draw a paint's sample for a legend. Returns the device pixels per pixel of the page.
 *
 * @param {HTMLCanvasElement} canvas
 * @param {Paint} paint
 */
export function drawSwatch(canvas, paint) {
  const ratio = resizeCanvas(canvas, 22, 12);
  new Painter(getContext(canvas), ratio).fill(paint, 0, 0, canvas.width, canvas.height);
  return ratio;
}
