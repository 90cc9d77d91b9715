// @ts-check
// A running job on a page: curves over all ranks, loops, states, a stop button.

import { makePairs, makeTable, showState } from "../shared/card.js";
import { element, setText } from "../shared/dom.js";
import { showTooltip } from "../shared/pointer.js";
import { onAppearanceChange } from "../shared/theme.js";
import { sendHeartbeats } from "../shared/wire.js";
import { CurveChart } from "./curve.js";
import { buildPage, makeBar } from "./page.js";
import { describeStep } from "./points.js";

/** @import { Cell } from "../shared/card.js" */
/** @import { Context } from "../shared/wire.js" */
/** @import { Curve, Look } from "./curve.js" */
/** @import { Bar } from "./page.js" */
/** @import { Axis } from "./points.js" */

/**
 * The content that the kernel sends.
 *
 * @typedef {object} Content
 * @property {string} heading
 * @property {string} context
 * @property {boolean} running
 * @property {Bar[]} bars
 * @property {Curve[]} charts
 * @property {string[]} titles of the table's columns
 * @property {{rank: number, cells: Cell[]}[]} ranks rows of the table
 * @property {string[]} notes
 * @property {number} updates
 */

const STOP_RETRY_MS = 5000; // until the stop button can be clicked again
const NUM_TEXT_COLUMNS = 2; // of the table; numbers follow

/** One job on a page. */
class WatchView {
  /** @type {Map<string, CurveChart>} */
  #charts = new Map();
  /** @type {Look} */
  #look = { logarithmic: false, weight: 0 };
  #stoppedAt = 0; // when the stop button was clicked, in milliseconds; 0: it was not

  /** @param {Context} context */
  constructor({ model, el }) {
    this.model = model;
    this.page = buildPage((weight) => {
      this.#look.weight = weight;
      this.#draw();
    });
    el.append(this.page.root);
    const { stop, logarithm, root } = this.page;
    stop.addEventListener("click", () => this.#stop());
    logarithm.addEventListener("click", () => {
      this.#look.logarithmic = !this.#look.logarithmic;
      logarithm.setAttribute("aria-pressed", String(this.#look.logarithmic));
      this.#draw();
    });
    model.on("change:content", this.#draw);
    this.#draw();
    const stopObserving = onAppearanceChange(root, () => {
      this.#measure();
      for (const chart of this.#charts.values()) chart.draw();
    });
    const stopHeartbeats = sendHeartbeats(model, root);
    this.close = () => {
      stopHeartbeats();
      stopObserving();
      model.off("change:content", this.#draw);
    };
  }

  #announce = (/** @type {string} */ text) => {
    this.page.live.textContent = text;
  };

  #stop() {
    this.#stoppedAt = performance.now();
    this.model.send({ op: "stop" });
    this.#announce("the cell is being stopped");
    this.#draw();
    setTimeout(this.#draw, STOP_RETRY_MS + 50);
  }

  #draw = () => {
    const { page } = this;
    const top = page.ranks.scrollTop;
    /** @type {Content} */
    const data = this.model.get("content");
    setText(page.heading, data.context);
    showState(page.state, data.running ? "live" : "idle");
    const isStopping = this.#stoppedAt > 0 && performance.now() - this.#stoppedAt < STOP_RETRY_MS;
    if (!data.running) this.#stoppedAt = 0;
    page.stop.disabled = !data.running || isStopping;
    setText(page.stop, data.running && this.#stoppedAt ? "stopping …" : "stop cell");
    page.bars.replaceChildren(...data.bars.map(makeBar));
    this.#drawCharts(data.charts);
    page.empty.hidden = data.charts.length > 0 || data.bars.length > 0;
    const columns = data.titles.map((title, i) => ({ title, isNumber: i >= NUM_TEXT_COLUMNS }));
    const rows = data.ranks.map(({ rank, cells }) => ({
      name: `rank ${rank}`,
      cells,
      attributes: { "data-rank": rank },
    }));
    page.ranks.replaceChildren(makeTable(columns, rows));
    if (top) page.ranks.scrollTop = top;
    page.notes.replaceChildren(...data.notes.map((note) => element("div", {}, note)));
    page.root.dataset.updates = String(data.updates);
  };

  /** @param {Curve[]} curves */
  #drawCharts(curves) {
    const names = new Set(curves.map((curve) => curve.name));
    for (const [name, chart] of this.#charts) {
      if (names.has(name)) continue;
      chart.root.remove();
      this.#charts.delete(name);
    }
    for (const axis of /** @type {Axis[]} */ (["steps", "seconds"])) {
      const group = this.page.groups[axis];
      const own = curves.filter((curve) => curve.axis === axis);
      group.hidden = !own.length;
      own.forEach((curve, i) => {
        const chart = this.#charts.get(curve.name) ?? new CurveChart(curve, this.#moveCursor, this.#announce);
        this.#charts.set(curve.name, chart);
        // Move it only if necessary: a node that is moved loses the focus.
        if (group.children[i] !== chart.root) group.insertBefore(chart.root, group.children[i] ?? null);
      });
    }
    this.#measure();
    for (const curve of curves) this.#charts.get(curve.name)?.update(curve, this.#look);
  }

  #measure() {
    for (const { chart } of this.#charts.values()) chart.measure();
  }

  /**
   * Show one step in all charts with the same axis; null: none.
   *
   * @param {CurveChart} origin
   * @param {number | null} step
   * @param {PointerEvent} [event]
   */
  #moveCursor = (origin, step, event) => {
    /** @type {[string, string][]} */
    const pairs = [];
    for (const chart of this.#charts.values()) {
      if (chart.curve.axis !== origin.curve.axis) continue;
      const text = chart.showAt(step);
      if (text) pairs.push([chart.curve.name, text]);
    }
    const { root, tip } = this.page;
    if (step === null || !event) {
      showTooltip(tip, root, "");
      return;
    }
    const frame = root.getBoundingClientRect();
    const at = origin.curve.axis === "steps" ? Math.round(step) : Number(step.toFixed(1));
    const words = makePairs(describeStep(at, origin.curve.axis), pairs);
    showTooltip(tip, root, words, event.clientX - frame.left + 14, event.clientY - frame.top + 16);
  };
}

export default () => ({ render: (/** @type {Context} */ context) => new WatchView(context).close });
