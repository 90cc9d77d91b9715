// @ts-check
// The last step of each pipeline: measured above ideal, the bubble between the boxes.

import { contextOf, fit, Painter } from "../shared/canvas.js";
import { create } from "../shared/dom.js";
import { duration } from "../shared/format.js";
import { part } from "./page.js";

/** @import { Paint, PipelineStep, StepRows } from "./store.js" */

/** @typedef {{row: number, from: number, to: number, words: string}} DrawnBox times in seconds from the step's start */

const ROW_HEIGHT = 20; // pixels of the page

/**
 * Draw the rows of a step; returns their boxes, to be found by the pointer.
 *
 * @param {HTMLCanvasElement} canvas
 * @param {PipelineStep} step
 * @param {StepRows} rows
 * @param {Paint[]} paints
 */
function drawStep(canvas, step, rows, paints) {
  const width = canvas.clientWidth;
  const ratio = fit(canvas, width, step.ranks.length * ROW_HEIGHT);
  const painter = new Painter(contextOf(canvas), ratio);
  const bubble = /** @type {Paint} */ (paints.find((paint) => paint.kind === "bubble"));
  const scale = (width * ratio) / step.seconds;
  const several = new Set(rows.boxes.map(([, , , , stage]) => stage)).size > step.ranks.length;
  const tall = (ROW_HEIGHT - 3) * ratio;
  /** @type {DrawnBox[]} */
  const drawn = [];
  painter.context.clearRect(0, 0, canvas.width, canvas.height);
  step.ranks.forEach((rank, row) => {
    const top = (row * ROW_HEIGHT + 1) * ratio;
    let free = 0;
    const boxes = rows.boxes.filter((box) => box[0] === row).sort((a, b) => a[1] - b[1]);
    for (const [, start, length, code, stage, microbatch, action] of boxes) {
      if ((start - free) * scale > 2) {
        painter.fill(bubble, free * scale, top, (start - free) * scale, tall);
        drawn.push({ row, from: free, to: start, words: `rank ${rank} · bubble, idle · ${duration(start - free)}` });
      }
      const wide = Math.max(1, length * scale - 0.5);
      painter.fill(paints[code], start * scale, top, wide, tall);
      painter.write(several ? `${stage}·${microbatch}` : String(microbatch), start * scale, top, wide, tall);
      free = start + length;
      const kind = `${paints[code].label} (${action})`;
      const words = `rank ${rank} · ${kind} · stage ${stage}, microbatch ${microbatch} · ${duration(length)}`;
      drawn.push({ row, from: start, to: free, words });
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
   * @param {(words: string, x?: number, y?: number) => void} say shows words next to a place; none: hides them
   */
  constructor(root, paints, say) {
    this.root = root;
    this.paints = paints;
    this.say = say;
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
    box.append(create("div", "", { textContent: step.words[0].toUpperCase() + step.words.slice(1) }));
    for (const rows of step.rows) {
      const line = part("step-row");
      const title = create("span", "", { textContent: `${rows.title}, bubble ${rows.bubble}` });
      line.append(title, this.#buildCanvas(step, rows));
      box.append(line);
    }
    if (step.cut) box.append(part("muted", "div", { textContent: `${step.cut} more boxes are left out` }));
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
    // Properties, as a signal would keep each listener, and so each canvas, as long as the view is there.
    canvas.onpointermove = (event) => {
      const time = (event.offsetX / canvas.clientWidth) * step.seconds;
      const row = Math.floor(event.offsetY / ROW_HEIGHT);
      const found = boxes.find((box) => box.row === row && box.from <= time && time <= box.to);
      this.say(found?.words ?? "", canvas.offsetLeft + event.offsetX, canvas.offsetTop + event.offsetY);
    };
    canvas.onpointerleave = () => this.say("");
    return canvas;
  }
}
