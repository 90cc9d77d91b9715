// A running job: curves over all ranks, loops, states, a stop button. First pure functions (tests/js), then the view.

import { element, sayHere, setText, shape, size } from "./common.js";

// ---- points, scales and words --------------------------------------------------------------------------------------

/** The points of a curve from bytes: float32 of all steps, then of all lows, means and highs. */
export function decode(bytes) {
  const view = bytes instanceof DataView ? bytes : new DataView(bytes?.buffer ?? bytes ?? new ArrayBuffer(0));
  const count = Math.floor(view.byteLength / 16);
  const column = (number) =>
    Array.from({ length: count }, (_, index) => view.getFloat32(4 * (number * count + index), true));
  return { steps: column(0), lows: column(1), means: column(2), highs: column(3) };
}

/** What the vertical axis spans; of a logarithm only where all values are above zero. */
export function range(points, logarithmic) {
  const low = Math.min(...points.lows);
  const high = Math.max(...points.highs);
  if (!points.steps.length) return { low: 0, high: 1, logarithmic: false };
  if (logarithmic && low > 0) {
    return low === high ? { low: low / 2, high: high * 2, logarithmic: true } : { low, high, logarithmic: true };
  }
  const margin = low === high ? Math.abs(low) * 0.1 || 1 : 0;
  return { low: low - margin, high: high + margin, logarithmic: false };
}

/** Where a value is between the ends of a range: 0 at the bottom, 1 at the top. */
export function place(value, { low, high, logarithmic }) {
  if (logarithmic) return (Math.log(value) - Math.log(low)) / (Math.log(high) - Math.log(low));
  return (value - low) / (high - low);
}

/** SVG paths in a frame: the line of means, and the band from lows to highs. */
export function paths(points, span, { left, top, width, height }) {
  const { steps } = points;
  if (!steps.length) return { line: "", band: "" };
  const first = steps[0];
  const wide = steps[steps.length - 1] - first || 1;
  const x = (index) => (left + (width * (steps[index] - first)) / wide).toFixed(1);
  const y = (value) => (top + height * (1 - place(value, span))).toFixed(1);
  const at = (values) => values.map((value, index) => `${x(index)} ${y(value)}`);
  const band = [...at(points.highs), ...at(points.lows).reverse()];
  return { line: `M${at(points.means).join("L")}`, band: `M${band.join("L")}z` };
}

/** The point next to a share of the width, 0 to 1; -1 when there is none. */
export function nearest(points, share) {
  const { steps } = points;
  if (!steps.length) return -1;
  const wanted = steps[0] + share * (steps[steps.length - 1] - steps[0]);
  let best = 0;
  steps.forEach((step, index) => {
    if (Math.abs(step - wanted) < Math.abs(steps[best] - wanted)) best = index;
  });
  return best;
}

/** A number for people: bytes, a share, or at most four digits. */
export function words(value, kind) {
  if (kind === "share") return `${Math.round(100 * value)} %`;
  if (kind === "bytes") return size(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value);
  const large = Math.abs(value);
  return large >= 1e-4 && large < 1e6 ? String(Number(value.toPrecision(4))) : value.toExponential(3);
}

/** One point in words. */
export function describe(points, index, { kind, along }) {
  const where = along === "s" ? `after ${words(points.steps[index], "number")} s` : `step ${points.steps[index]}`;
  const [low, mean, high] = [points.lows, points.means, points.highs].map((column) => words(column[index], kind));
  return `${where}: ${mean}${low === high ? "" : ` (${low} to ${high} over ranks)`}`;
}

/** Which point a key moves the cursor to; null when the key is none of the curve's. */
export function moved(index, count, key) {
  if (!count) return null;
  const from = index < 0 ? count : index;
  const steps = { ArrowLeft: from - 1, ArrowRight: index < 0 ? 0 : index + 1, Home: 0, End: count - 1 };
  if (key === "Escape") return -1;
  return key in steps ? Math.max(0, Math.min(count - 1, steps[key])) : null;
}

// ---- the view ------------------------------------------------------------------------------------------------------

const AGAIN_MS = 5000; // after which a press of the button that has not helped may be repeated
const FRAME = { left: 0, top: 4, width: 300, height: 74 };

/** One curve; `update` draws it anew, the cursor stays where it is. */
function makeChart(say) {
  const title = element("b");
  const told = element("span");
  const box = `0 0 ${FRAME.width} ${FRAME.height + 2 * FRAME.top}`;
  const svg = shape("svg", { viewBox: box, preserveAspectRatio: "none", role: "img", tabindex: "0" });
  const band = shape("path", { class: "axon-watch-band" });
  const line = shape("path", { class: "axon-watch-mean", "vector-effect": "non-scaling-stroke" });
  const dot = shape("circle", { r: 2.5, class: "axon-watch-dot" });
  const cursor = shape("path", { class: "axon-watch-cursor", "vector-effect": "non-scaling-stroke" });
  const edge = (y) => shape("path", { d: `M0 ${y}h${FRAME.width}`, class: "axon-watch-grid" });
  svg.append(edge(FRAME.top), edge(FRAME.top + FRAME.height), band, line, dot, cursor);
  const axis = element("div", { class: "axon-view-muted axon-watch-axis" });
  const root = element("div", { class: "axon-watch-chart" }, element("div", {}, title, " ", told), svg, axis);
  let chart = null;
  let points = decode();
  let logarithmic = false;
  let at = -1;

  function draw() {
    const span = range(points, logarithmic);
    const found = paths(points, span, FRAME);
    const last = points.steps.length - 1;
    band.setAttribute("d", found.band);
    line.setAttribute("d", last > 0 ? found.line : "");
    dot.setAttribute("visibility", last === 0 ? "visible" : "hidden");
    if (last === 0) {
      dot.setAttribute("cx", 3);
      dot.setAttribute("cy", FRAME.top + FRAME.height * (1 - place(points.means[0], span)));
    }
    if (at > last) at = last;
    const wide = points.steps[last] - points.steps[0] || 1;
    const x = at < 0 ? 0 : (FRAME.width * (points.steps[at] - points.steps[0])) / wide;
    cursor.setAttribute("d", at < 0 ? "" : `M${x} ${FRAME.top}v${FRAME.height}`);
    const along = chart.along === "s" ? " s" : "";
    const ends = last < 0 ? "" : `${words(points.steps[0], "number")} to ${words(points.steps[last], "number")}${along}`;
    const scale = `${words(span.low, chart.kind)} to ${words(span.high, chart.kind)}`;
    const kind = span.logarithmic ? ", logarithmic" : "";
    axis.textContent = at < 0 ? `↔ ${chart.along === "s" ? "" : "steps "}${ends} · ↕ ${scale}${kind}` : describe(points, at, chart);
    svg.setAttribute("aria-label", `${chart.name}: ${chart.words}; ${chart.along === "s" ? "" : "steps "}${ends}`);
    svg.dataset.points = String(last + 1);
    title.textContent = chart.name;
    told.textContent = root.title = chart.words;
  }

  svg.addEventListener("keydown", (event) => {
    const next = event.ctrlKey || event.metaKey || event.altKey ? null : moved(at, points.steps.length, event.key);
    if (next === null) return;
    event.preventDefault();
    event.stopPropagation();
    at = next;
    draw();
    if (at >= 0) say(`${chart.name}, ${describe(points, at, chart)}`);
  });
  svg.addEventListener("pointermove", (event) => {
    const frame = svg.getBoundingClientRect();
    at = nearest(points, Math.max(0, Math.min(1, (event.clientX - frame.left) / (frame.width || 1))));
    draw();
  });
  svg.addEventListener("pointerleave", () => {
    at = -1;
    draw();
  });
  return {
    root,
    update(fresh, asLogarithm) {
      [chart, points, logarithmic] = [fresh, decode(fresh.points), asLogarithm];
      draw();
    },
  };
}

function makeBar({ desc, low, high, words: told, is_over: over }) {
  const part = (share) => {
    const filled = element("i");
    filled.style.width = `${(100 * share).toFixed(1)}%`;
    return filled;
  };
  const track = element("div", { class: "axon-watch-track", role: "progressbar", "aria-valuemin": 0, "aria-valuemax": 100 });
  track.setAttribute("aria-valuenow", Math.round(100 * low));
  track.setAttribute("aria-label", `${desc || "progress"}: ${told}`);
  track.append(part(high), part(low));
  const row = element("div", { class: "axon-watch-bar" }, track, element("span", {}, `${desc || "progress"}: ${told}`));
  if (over) row.classList.add("axon-view-muted");
  return row;
}

function buildPage() {
  const heading = element("b", { class: "axon-watch-heading" });
  const logarithm = element("button", { type: "button", class: "axon-view-switch", "aria-pressed": "false" }, "log scale");
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

function table({ titles, ranks }) {
  const head = element("tr", {}, ...titles.map((title) => element("th", { scope: "col" }, title)));
  const rows = ranks.map(([rank, ...cells]) =>
    element("tr", { "data-rank": rank }, element("th", { scope: "row" }, rank), ...cells.map((cell) => element("td", {}, cell))),
  );
  return element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows));
}

export default () => ({
  render({ model, el }) {
    const page = buildPage();
    const charts = new Map();
    let logarithmic = false;
    let pressed = 0;
    el.append(page.root);

    const say = (text) => (page.live.textContent = text);

    function drawCharts(data) {
      const names = new Set(data.charts.map((chart) => chart.name));
      for (const [name, chart] of charts) {
        if (names.has(name)) continue;
        chart.root.remove();
        charts.delete(name);
      }
      data.charts.forEach((chart, index) => {
        if (!charts.has(chart.name)) charts.set(chart.name, makeChart(say));
        const { root, update } = charts.get(chart.name);
        // Moved only when it must be: a node that is moved loses the focus.
        if (page.charts.children[index] !== root) page.charts.insertBefore(root, page.charts.children[index] ?? null);
        update(chart, logarithmic);
      });
    }

    function draw() {
      const data = model.get("content");
      setText(page.heading, data.heading);
      const waits = pressed && performance.now() - pressed < AGAIN_MS;
      if (!data.running) pressed = 0;
      page.stop.disabled = !data.running || Boolean(waits);
      page.stop.textContent = data.running && pressed ? "■ stopping …" : "■ stop";
      page.stop.title = "Interrupt the cell on all ranks, as Jupyter's stop button does";
      page.bars.replaceChildren(...data.bars.map(makeBar));
      drawCharts(data);
      const top = page.ranks.scrollTop;
      page.ranks.replaceChildren(table(data));
      page.ranks.scrollTop = top;
      page.notes.replaceChildren(...data.notes.map((note) => element("div", {}, note)));
      page.root.dataset.updates = String(data.updates);
    }

    page.stop.addEventListener("click", () => {
      pressed = performance.now();
      model.send({ op: "stop" });
      say("the cell is being stopped");
      draw();
      setTimeout(draw, AGAIN_MS + 50);
    });
    page.logarithm.addEventListener("click", () => {
      logarithmic = !logarithmic;
      page.logarithm.setAttribute("aria-pressed", String(logarithmic));
      draw();
    });
    model.on("change:content", draw);
    draw();
    const unsay = sayHere(model, page.root);
    return () => {
      unsay();
      model.off("change:content", draw);
    };
  },
});
