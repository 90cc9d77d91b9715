// @ts-check
// A running job on a page: curves over all ranks, loops, states, a stop button.

import { element, setText } from "../shared/dom.js";
import { sendHeartbeats } from "../shared/wire.js";
import { Chart } from "./chart.js";

/** @import { Context } from "../shared/wire.js" */
/** @import { Curve } from "./chart.js" */

/**
 * A loop, with the progress of the slowest and the fastest rank, from 0 to 1.
 *
 * @typedef {{desc: string, low: number, high: number, text: string, is_over: boolean}} Bar
 */

/**
 * The content that the kernel sends.
 *
 * @typedef {object} Content
 * @property {string} heading
 * @property {boolean} running
 * @property {Bar[]} bars
 * @property {Curve[]} charts
 * @property {string[]} titles of the table's columns
 * @property {string[][]} ranks rows of the table
 * @property {string[]} notes
 * @property {number} updates
 */

const STOP_RETRY_MS = 5000; // until the stop button can be clicked again

/** @param {Bar} bar */
function makeBar({ desc, low, high, text, is_over: isOver }) {
  /** @param {number} share */
  const part = (share) => {
    const filled = element("i");
    filled.style.width = `${(100 * share).toFixed(1)}%`;
    return filled;
  };
  const label = `${desc || "progress"}: ${text}`;
  const range = { "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": Math.round(100 * low) };
  const track = element("div", { class: "axon-watch-track", role: "progressbar", ...range, "aria-label": label });
  track.append(part(high), part(low));
  const row = element("div", { class: "axon-watch-bar" }, track, element("span", {}, label));
  if (isOver) row.classList.add("axon-view-muted");
  return row;
}

/** @param {Content} content */
function makeTable({ titles, ranks }) {
  const head = element("tr", {}, ...titles.map((title) => element("th", { scope: "col" }, title)));
  const rows = ranks.map(([rank, ...cells]) => {
    const name = element("th", { scope: "row" }, rank);
    return element("tr", { "data-rank": rank }, name, ...cells.map((cell) => element("td", {}, cell)));
  });
  return element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows));
}

function buildPage() {
  const heading = element("b", { class: "axon-watch-heading" });
  const attributes = { type: "button", class: "axon-view-switch", "aria-pressed": "false" };
  const logarithm = element("button", attributes, "log scale");
  const stop = element("button", { type: "button", class: "axon-watch-stop" }, "■ stop");
  const bars = element("div", { class: "axon-watch-bars" });
  const charts = element("div", { class: "axon-watch-charts" });
  const ranks = element("div", { class: "axon-watch-ranks" });
  const notes = element("div", { class: "axon-view-muted" });
  const live = element("div", { class: "axon-view-unseen", "aria-live": "polite" });
  const head = element("div", { class: "axon-watch-head" }, heading, logarithm, stop);
  const root = element("div", { class: "axon-view axon-watch" }, head, bars, charts, ranks, notes, live);
  return { root, heading, logarithm, stop, bars, charts, ranks, notes, live };
}

/** One job on a page. */
class WatchView {
  /** @type {Map<string, Chart>} */
  #charts = new Map();
  #logarithmic = false;
  #stoppedAt = 0; // when the stop button was clicked, in milliseconds; 0: it was not

  /** @param {Context} context */
  constructor({ model, el }) {
    this.model = model;
    this.page = buildPage();
    el.append(this.page.root);
    const { stop, logarithm, root } = this.page;
    stop.addEventListener("click", () => this.#stop());
    logarithm.addEventListener("click", () => {
      this.#logarithmic = !this.#logarithmic;
      logarithm.setAttribute("aria-pressed", String(this.#logarithmic));
      this.#draw();
    });
    model.on("change:content", this.#draw);
    this.#draw();
    const stopHeartbeats = sendHeartbeats(model, root);
    this.close = () => {
      stopHeartbeats();
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
    /** @type {Content} */
    const data = this.model.get("content");
    setText(page.heading, data.heading);
    const isStopping = this.#stoppedAt > 0 && performance.now() - this.#stoppedAt < STOP_RETRY_MS;
    if (!data.running) this.#stoppedAt = 0;
    page.stop.disabled = !data.running || isStopping;
    page.stop.textContent = data.running && this.#stoppedAt ? "■ stopping …" : "■ stop";
    page.stop.title = "Interrupt the cell on all ranks, as Jupyter's stop button does";
    page.bars.replaceChildren(...data.bars.map(makeBar));
    this.#drawCharts(data.charts);
    const top = page.ranks.scrollTop;
    page.ranks.replaceChildren(makeTable(data));
    page.ranks.scrollTop = top;
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
    const { charts } = this.page;
    curves.forEach((curve, i) => {
      const chart = this.#charts.get(curve.name) ?? new Chart(curve, this.#announce);
      this.#charts.set(curve.name, chart);
      // Move it only if necessary: a node that is moved loses the focus.
      if (charts.children[i] !== chart.root) charts.insertBefore(chart.root, charts.children[i] ?? null);
      chart.update(curve, this.#logarithmic);
    });
  }
}

export default () => ({ render: (/** @type {Context} */ context) => new WatchView(context).close });
