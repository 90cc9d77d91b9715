// @ts-check
// Drawings of tensors' parts, and of all tensors by bytes.

import { makeSwatch } from "../shared/card.js";
import { element, svgElement } from "../shared/dom.js";
import { inkOn } from "../shared/theme.js";
import { nestedTreemap } from "./layout.js";

/** @import { Theme } from "../shared/theme.js" */
/** @import { Box, Drawing, PartBox, Tensor, Tile } from "./layout.js" */

/** @typedef {(text: string, event?: PointerEvent) => void} ShowTooltip an empty text hides it */

const MAP_HEIGHT = 380; // pixels
export const NUM_COLORS = 8; // of ranks
const PALE = 0.55;
const MAP_LETTER = 6.3; // pixels

/**
 * The name of a part's colour.
 *
 * @param {number} rank the first one that holds it; -1: all hold a copy
 */
function tokenOf(rank) {
  return rank < 0 ? "kind-other" : `rank-${rank % NUM_COLORS}`;
}

/**
 * @param {number} rank
 * @returns {Record<string, string | number>}
 */
function paintOf(rank) {
  const isPale = rank >= 0 && Math.floor(rank / NUM_COLORS) % 2 === 1;
  return { fill: `var(--axon-${tokenOf(rank)})`, ...(isPale ? { "fill-opacity": PALE } : {}) };
}

/**
 * @param {Drawing} drawing
 * @param {Theme} theme
 * @param {ShowTooltip} show
 */
export function drawParts(drawing, theme, show) {
  const { width, height } = drawing;
  const text = [...drawing.boxes.map((box) => box.text), drawing.empty].filter(Boolean).join("; ");
  const size = { width: width + 2, height: height + 2 };
  const viewBox = `-1 -1 ${size.width} ${size.height}`;
  const svg = svgElement("svg", { ...size, viewBox, role: "img", "aria-label": text });
  for (const part of drawing.boxes) {
    const rect = drawPart(part, part, 1);
    svg.append(rect);
    if (part.label) {
      const center = { x: part.x + part.width / 2, y: part.y + part.height / 2 + 3.5 };
      const fill = inkOn(theme.of(tokenOf(part.rank)));
      svg.append(svgElement("text", { ...center, fill, class: "axon-shards-label" }, part.label));
    }
    rect.addEventListener("pointerenter", (event) => show(part.text, event));
    rect.addEventListener("pointerleave", () => show(""));
  }
  return svg;
}

/**
 * @param {PartBox} part
 * @param {Box} area
 * @param {number} gap
 */
function drawPart({ rank, ranks }, { x, y, width, height }, gap) {
  const inset = Math.min(width, height) > 4 * gap ? gap : 0;
  const sides = { width: Math.max(0.5, width - inset), height: Math.max(0.5, height - inset) };
  return svgElement("rect", {
    x,
    y,
    ...sides,
    rx: inset,
    ...paintOf(rank),
    class: "axon-shards-part",
    "data-ranks": ranks.join(" "),
  });
}

/**
 * Draw tensors as boxes by bytes, modules within modules, each with its ranks' parts.
 *
 * @param {Tensor[]} tensors
 * @param {Drawing[]} drawings
 * @param {{width: number, theme: Theme}} options width in pixels
 * @param {ShowTooltip} show
 */
export function drawMap(tensors, drawings, { width, theme }, show) {
  const height = MAP_HEIGHT;
  const viewBox = `0 0 ${width} ${height}`;
  const svg = svgElement("svg", { width, height, viewBox, role: "img", class: "axon-shards-map" });
  svg.setAttribute("aria-label", `bytes of ${tensors.length} tensors, by area`);
  for (const tile of nestedTreemap(tensors, width, height)) {
    if (tile.index < 0) svg.append(...drawModule(tile));
    else svg.append(drawTile(tile, tensors[tile.index], drawings[tensors[tile.index].drawing], theme, show));
  }
  return svg;
}

/** @param {Tile} tile */
function drawModule({ x, y, width, height, label }) {
  const frame = svgElement("rect", {
    x: x + 0.5,
    y: y + 0.5,
    width: Math.max(0, width - 1),
    height: Math.max(0, height - 1),
  });
  frame.setAttribute("class", "axon-shards-module");
  if (!label) return [frame];
  return [frame, svgElement("text", { x: x + 5, y: y + 12, class: "axon-shards-module-label" }, label)];
}

/**
 * @param {Tile} tile
 * @param {Tensor} tensor
 * @param {Drawing} drawing
 * @param {Theme} theme
 * @param {ShowTooltip} show
 */
function drawTile(tile, tensor, drawing, theme, show) {
  const { name, role, shape, placement, total } = tensor;
  const group = svgElement("g", { class: "axon-shards-tile", "data-name": name });
  const { x, y, width, height } = tile;
  const [across, down] = [Math.max(0, width - 1) / drawing.width, Math.max(0, height - 1) / drawing.height];
  for (const part of drawing.boxes) {
    const area = {
      x: x + part.x * across,
      y: y + part.y * down,
      width: part.width * across,
      height: part.height * down,
    };
    group.append(drawPart(part, area, 0.5));
  }
  const first = drawing.boxes[0];
  if (tile.label && first) {
    const size = ` ${total}`;
    const hasSize = !tile.isTurned && (tile.label.length + size.length) * MAP_LETTER + 8 <= width;
    /** @type {Record<string, string | number>} */
    const place = tile.isTurned
      ? { transform: `translate(${x + width / 2 - 4} ${y + 5}) rotate(90)` }
      : { x: x + 5, y: y + 12 };
    if (tile.isTurned && drawing.boxes.length > 1) place["data-across"] = "";
    else place.fill = inkOn(theme.of(tokenOf(first.rank)));
    const label = svgElement("text", { ...place, class: "axon-shards-tile-label" }, tile.label);
    if (hasSize) label.append(svgElement("tspan", { "fill-opacity": 0.8 }, size));
    group.append(label);
  }
  const description = `${name}, ${role}, ${shape}: ${placement}; ${total} in all`;
  group.addEventListener("pointerenter", (event) => show(description, event));
  group.addEventListener("pointerleave", () => show(""));
  return group;
}

/** @param {Tensor[]} tensors @param {Drawing[]} drawings */
export function makeLegend(tensors, drawings) {
  const ranks = new Set(tensors.flatMap((tensor) => drawings[tensor.drawing].boxes.map((box) => box.rank)));
  const shown = [...ranks].sort((a, b) => a - b).slice(0, 2 * NUM_COLORS);
  const keys = shown.map((rank) => {
    const swatch = makeSwatch(tokenOf(rank));
    if (Number(paintOf(rank)["fill-opacity"])) swatch.style.opacity = String(PALE);
    return element("span", { class: "axon-view-key" }, swatch, rank < 0 ? "a copy on each rank" : `rank ${rank}`);
  });
  return element("div", { class: "axon-view-legend axon-shards-legend" }, ...keys);
}
