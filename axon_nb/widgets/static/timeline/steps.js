// @ts-check
// The last step of each pipeline: measured above ideal, with bubbles between the boxes.

import { getContext, Painter, resizeCanvas } from "../shared/canvas.js";
import { create } from "../shared/dom.js";
import { formatDuration } from "../shared/format.js";
import { part } from "./page.js";

/** @import { Paint, PipelineStep, StepRows } from "./store.js" */

/** @typedef {{row: number, from: number, to: number, text: string}} DrawnBox times in seconds from the step's start */

const ROW_HEIGHT = 20; // pixels of the page

/**
 * Draw the rows of a step; returns their boxes, which have tooltips.
 *
 * @param {HTMLCanvasElement} canvas
 * @param {PipelineStep} step
 * @param {StepRows} rows
 * @param {Paint[]} paints
 */
function drawStep(canvas, step, rows, paints) {
  const width = canvas.clientWidth;
  const ratio = resizeCanvas(canvas, width, step.ranks.length * ROW_HEIGHT);
  const painter = new Painter(getContext(canvas), ratio);
  const bubble = /** @type {Paint} */ (paints.find((paint) => paint.kind === "bubble"));
  const scale = (width * ratio) / step.seconds;
  const isInterleaved = new Set(rows.boxes.map(([, , , , stage]) => stage)).size > step.ranks.length;
  const height = (ROW_HEIGHT - 3) * ratio;
  /** @type {DrawnBox[]} */
  const drawn = [];
  painter.context.clearRect(0, 0, canvas.width, canvas.height);
  step.ranks.forEach((rank, row) => {
    const top = (row * ROW_HEIGHT + 1) * ratio;
    let free = 0;
    const boxes = rows.boxes.filter((box) => box[0] === row).sort((a, b) => a[1] - b[1]);
    for (const [, start, length, code, stage, microbatch, action] of boxes) {
      if ((start - free) * scale > 2) {
        painter.fill(bubble, free * scale, top, (start - free) * scale, height);
        drawn.push({
          row,
          from: free,
          to: start,
          text: `rank ${rank} · bubble, idle · ${formatDuration(start - free)}`,
        });
      }
      const boxWidth = Math.max(1, length * scale - 0.5);
      painter.fill(paints[code], start * scale, top, boxWidth, height);
      const label = isInterleaved ? `${stage}·${microbatch}` : String(microbatch);
      painter.write(label, start * scale, top, boxWidth, height);
      free = start + length;
      const kind = `${paints[code].label} (${action})`;
      const text = `rank ${rank} · ${kind} · stage ${stage}, microbatch ${microbatch} · ${formatDuration(length)}`;
      drawn.push({ row, from: start, to: free, text });
    }
  });
  return drawn;
}

/** The steps below a timeline. */
export class PipelineSteps {
  /** @type {(() => void)[]} */
  #redraws = [];

  /**
   * @param {HTMLElement} root
   * @param {Paint[]} paints
   * @param {(text: string, x?: number, y?: number) => void} showText as in `TimeView`
   */
  constructor(root, paints, showText) {
    this.root = root;
    this.paints = paints;
    this.showText = showText;
  }

  /** @param {PipelineStep[]} steps */
  show(steps) {
    this.#redraws = [];
    this.root.replaceChildren(...steps.map((step) => this.#build(step)));
    this.redraw();
  }

  redraw() {
    for (const redraw of this.#redraws) redraw();
  }

  /** @param {PipelineStep} step */
  #build(step) {
    const box = part("step");
    box.append(create("div", "", { textContent: step.text[0].toUpperCase() + step.text.slice(1) }));
    for (const rows of step.rows) {
      const line = part("step-row");
      const title = create("span", "", { textContent: `${rows.title}, bubble ${rows.bubble}` });
      line.append(title, this.#buildCanvas(step, rows));
      box.append(line);
    }
    if (step.omitted) box.append(part("muted", "div", { textContent: `${step.omitted} more boxes are left out` }));
    return box;
  }

  /**
   * @param {PipelineStep} step
   * @param {StepRows} rows
   */
  #buildCanvas(step, rows) {
    const canvas = create("canvas", "");
    canvas.setAttribute("role", "img");
    canvas.ariaLabel = `${rows.title}: ranks ${step.ranks.join(", ")} from the top, bubble ${rows.bubble}`;
    /** @type {DrawnBox[]} */
    let boxes = [];
    this.#redraws.push(() => {
      boxes = drawStep(canvas, step, rows, this.paints);
    });
    // Properties: a signal would keep each listener, and so each canvas, as long as the view is open.
    canvas.onpointermove = (event) => {
      const time = (event.offsetX / canvas.clientWidth) * step.seconds;
      const row = Math.floor(event.offsetY / ROW_HEIGHT);
      const found = boxes.find((box) => box.row === row && box.from <= time && time <= box.to);
      this.showText(found?.text ?? "", canvas.offsetLeft + event.offsetX, canvas.offsetTop + event.offsetY);
    };
    canvas.onpointerleave = () => this.showText("");
    return canvas;
  }
}
