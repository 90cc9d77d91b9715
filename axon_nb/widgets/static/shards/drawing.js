// @ts-check
// Drawings of tensors' parts, and of all tensors by bytes.

import { element, svgElement } from "../shared/dom.js";
import { treemap } from "./layout.js";

/** @import { Attributes } from "../shared/dom.js" */
/** @import { Drawing, Tensor } from "./layout.js" */

/** @typedef {(text: string, event?: PointerEvent) => void} ShowTooltip an empty text hides it */

const KINDS = ["sharded", "replicated", "partial", "own"];
const MAP_HEIGHT = 300; // pixels

/** @param {string} prefix of their identifiers */
export function makePatterns(prefix) {
  const defs = svgElement("defs");
  /** @type {(name: string, children: SVGElement[]) => void} */
  const add = (name, children) => {
    const size = { width: 8, height: 8, patternUnits: "userSpaceOnUse" };
    defs.append(svgElement("pattern", { id: `${prefix}-${name}`, ...size }, ...children));
  };
  /** @type {(d: string) => SVGElement} */
  const line = (d) => svgElement("path", { d, stroke: "#fff", "stroke-opacity": 0.55, "stroke-width": 1.5 });
  /** @type {(at: number) => SVGElement} */
  const dot = (at) => svgElement("circle", { cx: at, cy: at, r: 1.2, fill: "#fff", "fill-opacity": 0.7 });
  add("hatch", [line("M-2 2l4-4M0 8l8-8M6 10l4-4")]);
  add("dots", [dot(2), dot(6)]);
  add("grid", [line("M0 0h8M0 0v8")]);
  return defs;
}

/**
 * @param {Drawing} drawing
 * @param {string} prefix of the patterns' identifiers
 * @param {ShowTooltip} show
 */
export function drawParts(drawing, prefix, show) {
  const { width, height } = drawing;
  const text = [...drawing.boxes.map((box) => box.text), drawing.empty].filter(Boolean).join("; ");
  const size = { width: width + 2, height: height + 2 };
  const viewBox = `-1 -1 ${size.width} ${size.height}`;
  const svg = svgElement("svg", { ...size, viewBox, role: "img", "aria-label": text });
  for (const part of drawing.boxes) {
    const area = { x: part.x, y: part.y, width: part.width, height: part.height };
    const rect = svgElement("rect", { ...area, fill: part.color, class: "axon-shards-part" });
    svg.append(rect);
    if (part.pattern) {
      svg.append(svgElement("rect", { ...area, fill: `url(#${prefix}-${part.pattern})`, "pointer-events": "none" }));
    }
    if (part.label) {
      const center = { x: part.x + part.width / 2, y: part.y + part.height / 2 + 3.5 };
      /** @type {Attributes} */
      const halo = part.pattern ? { "paint-order": "stroke", stroke: part.color, "stroke-width": 3 } : {};
      svg.append(svgElement("text", { ...center, ...halo, fill: part.ink, class: "axon-shards-label" }, part.label));
    }
    rect.addEventListener("pointerenter", (event) => show(part.text, event));
    rect.addEventListener("pointerleave", () => show(""));
  }
  svg.append(svgElement("rect", { width, height, fill: "none", class: "axon-shards-frame" }));
  return svg;
}

/**
 * Draw tensors as boxes by bytes.
 *
 * @param {Tensor[]} tensors
 * @param {number} width pixels
 * @param {ShowTooltip} show
 */
export function drawMap(tensors, width, show) {
  const height = MAP_HEIGHT;
  const viewBox = `0 0 ${width} ${height}`;
  const svg = svgElement("svg", { width, height, viewBox, role: "img", class: "axon-shards-map" });
  svg.setAttribute("aria-label", `bytes of ${tensors.length} tensors, by area`);
  const bytes = tensors.map((tensor) => tensor.bytes);
  treemap(bytes, width, height).forEach((box, i) => {
    if (box.width < 1 || box.height < 1) return;
    const { name, role, shape, placement, kind, total } = tensors[i];
    const description = `${name}, ${role}, ${shape}: ${placement}; ${total} in all`;
    const inner = { x: box.x + 0.5, y: box.y + 0.5, width: box.width - 1, height: box.height - 1 };
    const rect = svgElement("rect", { ...inner, class: `axon-shards-tile axon-shards-${kind}`, "data-name": name });
    rect.addEventListener("pointerenter", (event) => show(description, event));
    rect.addEventListener("pointerleave", () => show(""));
    svg.append(rect);
    const letters = Math.floor((box.width - 6) / 6.5);
    if (letters < 4 || box.height < 14) return;
    const text = name.length <= letters ? name : `${name.slice(0, letters - 1)}…`;
    svg.append(svgElement("text", { x: box.x + 4, y: box.y + 12, class: "axon-shards-tile-label" }, text));
  });
  return svg;
}

/** @param {Tensor[]} tensors */
export function makeLegend(tensors) {
  const legend = element("div", { class: "axon-shards-legend" });
  for (const kind of KINDS.filter((each) => tensors.some((tensor) => tensor.kind === each))) {
    const tile = { x: 0.5, y: 0.5, width: 13, height: 11, class: `axon-shards-tile axon-shards-${kind}` };
    const swatch = svgElement("svg", { width: 14, height: 12 }, svgElement("rect", tile));
    legend.append(element("span", {}, swatch, kind === "own" ? "each rank's own" : kind));
  }
  return legend;
}
