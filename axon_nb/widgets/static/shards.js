// Where the parts of tensors are: a list of pictures, or a treemap by bytes. First pure functions (tests/js), then the view.

import { element, sayHere, shape } from "./common.js";

// ---- layout and words ----------------------------------------------------------------------------------------------

/** The tensors whose name, role or place has each word of the filter. */
export function matching(tensors, filter) {
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  return tensors.filter((tensor) => {
    const text = `${tensor.name} ${tensor.role} ${tensor.kind} ${tensor.where}`.toLowerCase();
    return words.every((word) => text.includes(word));
  });
}

/** Squarified treemap (Bruls, Huizing and van Wijk, 2000): a rectangle for each value, areas in proportion. */
export function treemap(values, width, height) {
  const total = values.reduce((sum, value) => sum + value, 0);
  const boxes = values.map(() => ({ x: 0, y: 0, width: 0, height: 0 }));
  if (!total || !width || !height) return boxes;
  const scale = (width * height) / total;
  const order = values.map((_, index) => index).sort((a, b) => values[b] - values[a]);
  let area = { x: 0, y: 0, width, height };
  let row = [];
  const side = () => Math.min(area.width, area.height);
  const worst = (indices) => {
    const areas = indices.map((index) => values[index] * scale);
    const sum = areas.reduce((a, b) => a + b, 0);
    const square = side() * side();
    return Math.max((square * Math.max(...areas)) / (sum * sum), (sum * sum) / (square * Math.min(...areas)));
  };
  const place = () => {
    const sum = row.reduce((a, index) => a + values[index] * scale, 0);
    const beside = area.width >= area.height;
    const thick = sum / side();
    let along = beside ? area.y : area.x;
    for (const index of row) {
      const long = (values[index] * scale) / thick;
      boxes[index] = beside
        ? { x: area.x, y: along, width: thick, height: long }
        : { x: along, y: area.y, width: long, height: thick };
      along += long;
    }
    area = beside
      ? { x: area.x + thick, y: area.y, width: Math.max(0, area.width - thick), height: area.height }
      : { x: area.x, y: area.y + thick, width: area.width, height: Math.max(0, area.height - thick) };
    row = [];
  };
  for (const index of order) {
    if (!values[index]) break;
    if (row.length && worst([...row, index]) > worst(row)) place();
    row.push(index);
  }
  if (row.length) place();
  return boxes;
}

/** Which tensors lie differently than before, by role and name. */
export function changed(before, after) {
  if (!before) return new Set();
  const key = (tensor) => `${tensor.role} ${tensor.name}`;
  const place = (model, tensor) => `${tensor.where} ${JSON.stringify(model.drawings[tensor.drawing])}`;
  const known = new Map(before.tensors.map((tensor) => [key(tensor), place(before, tensor)]));
  return new Set(after.tensors.filter((t) => known.get(key(t)) !== place(after, t)).map(key));
}

// ---- the view ------------------------------------------------------------------------------------------------------

const ROWS = 100;
const KINDS = ["sharded", "replicated", "partial", "own"];
let uniqueId = 0;

function patterns(prefix) {
  const defs = shape("defs", {});
  const add = (name, child) => {
    const pattern = shape("pattern", { id: `${prefix}-${name}`, width: 8, height: 8, patternUnits: "userSpaceOnUse" });
    pattern.append(...child);
    defs.append(pattern);
  };
  const line = (d) => shape("path", { d, stroke: "#fff", "stroke-opacity": 0.55, "stroke-width": 1.5 });
  add("hatch", [line("M-2 2l4-4M0 8l8-8M6 10l4-4")]);
  add("dots", [2, 6].map((at) => shape("circle", { cx: at, cy: at, r: 1.2, fill: "#fff", "fill-opacity": 0.7 })));
  add("grid", [line("M0 0h8M0 0v8")]);
  return defs;
}

function picture(drawing, prefix, show) {
  const { width, height } = drawing;
  const said = [...drawing.boxes.map((box) => box.words), drawing.empty].filter(Boolean).join("; ");
  const box = `-1 -1 ${width + 2} ${height + 2}`;
  const svg = shape("svg", { width: width + 2, height: height + 2, viewBox: box, role: "img", "aria-label": said });
  for (const part of drawing.boxes) {
    const { x, y } = part;
    const area = { x, y, width: part.width, height: part.height };
    const rect = shape("rect", { ...area, fill: part.color, class: "axon-shards-part" });
    svg.append(rect);
    if (part.pattern) svg.append(shape("rect", { ...area, fill: `url(#${prefix}-${part.pattern})`, "pointer-events": "none" }));
    if (part.label) {
      const middle = { x: x + part.width / 2, y: y + part.height / 2 + 3.5 };
      const halo = part.pattern ? { "paint-order": "stroke", stroke: part.color, "stroke-width": 3 } : {};
      const text = shape("text", { ...middle, ...halo, fill: part.ink, class: "axon-shards-label" });
      text.textContent = part.label;
      svg.append(text);
    }
    rect.addEventListener("pointerenter", (event) => show(part.words, event));
    rect.addEventListener("pointerleave", () => show(""));
  }
  svg.append(shape("rect", { width, height, fill: "none", class: "axon-shards-frame" }));
  return svg;
}

function buildPage(prefix) {
  const filter = element("input", { type: "search", placeholder: "filter by name, kind or axis", "aria-label": "filter" });
  const list = element("button", { type: "button", class: "axon-view-switch", "aria-pressed": "true" }, "list");
  const map = element("button", { type: "button", class: "axon-view-switch", "aria-pressed": "false" }, "by bytes");
  const heading = element("b", { class: "axon-shards-heading" });
  const state = element("span", { class: "axon-view-muted", "aria-live": "polite" });
  const totals = element("div", { class: "axon-shards-totals" });
  const body = element("div", { class: "axon-shards-body" });
  const notes = element("div", { class: "axon-view-muted" });
  const tip = element("div", { class: "axon-view-tip axon-shards-tip", role: "status", hidden: "" });
  const defs = shape("svg", { width: 0, height: 0, "aria-hidden": "true", class: "axon-shards-defs" });
  defs.append(patterns(prefix));
  const tools = element("div", { class: "axon-shards-tools" }, filter, list, map, state);
  const root = element("div", { class: "axon-view axon-shards" }, heading, totals, tools, body, notes, tip, defs);
  return { root, filter, list, map, heading, state, totals, body, notes, tip };
}

export default () => {
  let earlier = null;
  return {
    render({ model, el }) {
      const prefix = `axon-shards-${uniqueId++}`;
      const page = buildPage(prefix);
      const view = { kind: "list", filter: "", rows: ROWS, open: "" };
      let fresh = new Set();
      el.append(page.root);

      function show(words, event) {
        page.tip.hidden = !words;
        page.tip.textContent = words;
        if (!words || !event) return;
        const frame = page.root.getBoundingClientRect();
        page.tip.style.left = `${Math.max(0, Math.min(event.clientX - frame.left + 12, frame.width - page.tip.offsetWidth))}px`;
        page.tip.style.top = `${event.clientY - frame.top + 16}px`;
      }

      function row(data, tensor) {
        const drawing = data.drawings[tensor.drawing];
        const key = `${tensor.role} ${tensor.name}`;
        const name = element("th", { scope: "row" }, tensor.name);
        const cells = [tensor.role, tensor.shape, tensor.where, tensor.each].map((text) => element("td", {}, text));
        const drawn = element("td", {}, picture(drawing, prefix, show));
        if (drawing.empty) drawn.append(element("div", { class: "axon-view-muted" }, drawing.empty));
        const line = element("tr", { tabindex: "0", "data-name": tensor.name, "data-kind": tensor.kind }, name, ...cells, drawn);
        if (fresh.has(key)) line.classList.add("axon-shards-fresh");
        const details = () => {
          view.open = view.open === key ? "" : key;
          draw();
        };
        line.addEventListener("click", details);
        line.addEventListener("keydown", (event) => {
          if (event.key !== "Enter" && event.key !== " ") return;
          event.preventDefault();
          details();
        });
        if (view.open !== key) return [line];
        const parts = element("ul", {}, ...drawing.boxes.map((box) => element("li", {}, box.words)));
        if (drawing.empty) parts.append(element("li", {}, drawing.empty));
        return [line, element("tr", { class: "axon-shards-details" }, element("td", { colspan: "6" }, parts))];
      }

      function drawList(data, tensors) {
        const head = element("tr", {}, ...["tensor", "", "shape", "where", "on a rank", "parts by rank"].map((t) => element("th", { scope: "col" }, t)));
        const rows = tensors.slice(0, view.rows).flatMap((tensor) => row(data, tensor));
        page.body.replaceChildren(element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)));
        if (tensors.length > view.rows) {
          const more = element("button", { type: "button" }, `${tensors.length - view.rows} more`);
          more.addEventListener("click", () => {
            view.rows *= 4;
            draw();
          });
          page.body.append(more);
        }
      }

      function drawMap(data, tensors) {
        const width = Math.max(240, page.body.clientWidth || 700);
        const height = 300;
        const boxes = treemap(tensors.map((tensor) => tensor.bytes), width, height);
        const svg = shape("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", class: "axon-shards-map" });
        svg.setAttribute("aria-label", `bytes of ${tensors.length} tensors, by area`);
        tensors.forEach((tensor, index) => {
          const box = boxes[index];
          if (box.width < 1 || box.height < 1) return;
          const words = `${tensor.name}, ${tensor.role}, ${tensor.shape}: ${tensor.where}; ${tensor.total} in all`;
          const inner = { x: box.x + 0.5, y: box.y + 0.5, width: box.width - 1, height: box.height - 1 };
          const rect = shape("rect", { ...inner, class: `axon-shards-tile axon-shards-${tensor.kind}`, "data-name": tensor.name });
          rect.addEventListener("pointerenter", (event) => show(words, event));
          rect.addEventListener("pointerleave", () => show(""));
          svg.append(rect);
          const letters = Math.floor((box.width - 6) / 6.5);
          if (letters < 4 || box.height < 14) return;
          const label = shape("text", { x: box.x + 4, y: box.y + 12, class: "axon-shards-tile-label" });
          label.textContent = tensor.name.length <= letters ? tensor.name : `${tensor.name.slice(0, letters - 1)}…`;
          svg.append(label);
        });
        const legend = element("div", { class: "axon-shards-legend" });
        for (const kind of KINDS.filter((known) => tensors.some((tensor) => tensor.kind === known))) {
          const swatch = shape("svg", { width: 14, height: 12 });
          swatch.append(shape("rect", { x: 0.5, y: 0.5, width: 13, height: 11, class: `axon-shards-tile axon-shards-${kind}` }));
          legend.append(element("span", {}, swatch, kind === "own" ? "each rank's own" : kind));
        }
        page.body.replaceChildren(svg, legend);
      }

      function draw() {
        const data = model.get("content");
        page.heading.textContent = data.heading;
        page.totals.replaceChildren(
          ...data.totals.map(({ ranks, size, part }) => {
            const bar = element("span", { class: "axon-shards-bar" });
            bar.style.width = `${Math.round(100 * part)}px`;
            return element("span", { class: "axon-shards-total" }, `${ranks} `, bar, ` ${size}`);
          }),
        );
        const tensors = matching(data.tensors, view.filter);
        page.list.setAttribute("aria-pressed", String(view.kind === "list"));
        page.map.setAttribute("aria-pressed", String(view.kind === "map"));
        const changes = fresh.size ? ` · ${fresh.size} changed in the last update` : "";
        page.state.textContent = `${tensors.length} of ${data.tensors.length} shown${changes}`;
        (view.kind === "list" ? drawList : drawMap)(data, tensors);
        page.notes.replaceChildren(...data.notes.map((note) => element("div", {}, note)));
        page.root.dataset.updates = String(data.updates);
      }

      function update() {
        const data = model.get("content");
        fresh = changed(earlier, data);
        earlier = data;
        show("");
        draw();
      }

      page.filter.addEventListener("input", () => {
        view.filter = page.filter.value;
        draw();
      });
      page.list.addEventListener("click", () => {
        view.kind = "list";
        draw();
      });
      page.map.addEventListener("click", () => {
        view.kind = "map";
        draw();
      });
      model.on("change:content", update);
      const unsay = sayHere(model, page.root);
      earlier = earlier ?? model.get("content");
      draw();
      return () => {
        unsay();
        model.off("change:content", update);
      };
    },
  };
};
