// @ts-check
// The last step of each pipeline: measured above ideal on one scale, and what separates them.

import { getContext, Painter, resizeCanvas } from "../../shared/canvas.js";
import { makePairs } from "../../shared/card.js";
import { create, element } from "../../shared/dom.js";
import { formatDuration } from "../../shared/format.js";

/** @import { Theme } from "../../shared/theme.js" */
/** @import { Paint, PipelineStep, StepRows } from "../store.js" */

/** @typedef {{row: number, from: number, to: number, title: string, pairs: [string, string][]}} DrawnBox in seconds */

/** @typedef {{readonly theme: Theme, showText: (content: string | Node[], x?: number, y?: number) => void}} StepsView */

const ROW_HEIGHT = 20; // pixels of the page

/**
 * Draw the rows of a step; returns their boxes, which have tooltips.
 *
 * @param {HTMLCanvasElement} canvas
 * @param {PipelineStep} step
 * @param {StepRows} rows
 * @param {Paint[]} paints
 * @param {Theme} theme
 */
function drawStep(canvas, step, rows, paints, theme) {
  const width = canvas.clientWidth;
  const ratio = resizeCanvas(canvas, width, step.ranks.length * ROW_HEIGHT);
  const painter = new Painter(getContext(canvas), ratio, theme);
  const bubble = /** @type {Paint} */ (paints.find((paint) => paint.kind === "bubble"));
  const scale = (width * ratio) / step.seconds;
  const isInterleaved = new Set(rows.boxes.map(([, , , , stage]) => stage)).size > step.ranks.length;
  const height = (ROW_HEIGHT - 3) * ratio;
  /** @type {DrawnBox[]} */
  const drawn = [];
  painter.context.clearRect(0, 0, canvas.width, canvas.height);
  step.ranks.forEach((rank, row) => {
    const top = (row * ROW_HEIGHT + 1) * ratio;
    /** @type {(from: number, to: number, title: string, ...pairs: [string, string][]) => void} */
    const add = (from, to, title, ...pairs) => {
      drawn.push({ row, from, to, title, pairs: [["rank", `${rank}`], ["took", formatDuration(to - from)], ...pairs] });
    };
    let free = 0;
    const boxes = rows.boxes.filter((box) => box[0] === row).sort((a, b) => a[1] - b[1]);
    for (const [, start, length, code, stage, microbatch, action] of boxes) {
      if ((start - free) * scale > 2) {
        painter.fill(bubble, free * scale, top, (start - free) * scale, height);
        add(free, start, "bubble, idle");
      }
      const boxWidth = Math.max(1, length * scale - ratio);
      painter.fill(paints[code], start * scale, top, boxWidth, height);
      const label = isInterleaved ? `${stage}·${microbatch}` : String(microbatch);
      painter.write(label, start * scale, top, boxWidth, height, paints[code].token);
      free = start + length;
      const where = /** @type {[string, string][]} */ ([
        ["stage", `${stage}`],
        ["microbatch", `${microbatch}`],
      ]);
      add(start, free, `${paints[code].label} (${action})`, ...where);
    }
  });
  painter.context.fillStyle = theme.of("edge");
  painter.context.fillRect(Math.min(canvas.width - ratio, rows.seconds * scale), 0, ratio, canvas.height);
  return drawn;
}

/** The steps below a timeline. */
export class PipelineSteps {
  /** @type {(() => void)[]} */
  #redraws = [];

  /**
   * @param {HTMLElement} root
   * @param {Paint[]} paints
   * @param {StepsView} view
   */
  constructor(root, paints, view) {
    this.root = root;
    this.paints = paints;
    this.view = view;
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
    const box = create("div", "axon-timeline-step");
    const title = element("span", {}, element("b", {}, "Pipeline, last step"), " ");
    title.append(element("span", { class: "axon-view-muted" }, step.text));
    const above = element("span", { class: "axon-view-flagged" }, step.above);
    box.append(element("div", { class: "axon-timeline-step-head" }, title, above));
    for (const rows of step.rows) {
      const name = element("span", {}, rows.title, element("small", {}, formatDuration(rows.seconds)));
      name.append(element("small", {}, `bubble ${rows.bubble}`));
      box.append(element("div", { class: "axon-timeline-step-row" }, name, this.#buildCanvas(step, rows)));
    }
    if (step.omitted) {
      box.append(element("div", { class: "axon-view-muted" }, `${step.omitted} more boxes are left out`));
    }
    return box;
  }

  /**
   * @param {PipelineStep} step
   * @param {StepRows} rows
   */
  #buildCanvas(step, rows) {
    const label = `${rows.title}: ranks ${step.ranks.join(", ")} from the top, bubble ${rows.bubble}`;
    const canvas = element("canvas", { role: "img", "aria-label": label });
    /** @type {DrawnBox[]} */
    let boxes = [];
    this.#redraws.push(() => {
      boxes = drawStep(canvas, step, rows, this.paints, this.view.theme);
    });
    // Properties: a signal would keep each listener, and so each canvas, as long as the view is open.
    canvas.onpointermove = (event) => {
      const time = (event.offsetX / canvas.clientWidth) * step.seconds;
      const row = Math.floor(event.offsetY / ROW_HEIGHT);
      const found = boxes.find((box) => box.row === row && box.from <= time && time <= box.to);
      const words = found ? makePairs(found.title, found.pairs) : "";
      this.view.showText(words, canvas.offsetLeft + event.offsetX, canvas.offsetTop + event.offsetY);
    };
    canvas.onpointerleave = () => this.view.showText("");
    return canvas;
  }
}
