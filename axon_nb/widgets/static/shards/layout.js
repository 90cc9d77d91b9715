// @ts-check
// Which rank holds which part of which tensor: filters, folding, the treemap, and changes.

/** @import { Mesh } from "./mesh.js" */

/** @typedef {{x: number, y: number, width: number, height: number}} Box */

/** @typedef {Box & {text: string, rank: number, ranks: number[], label: string}} PartBox rank: the first of all ranks that
 *   hold it; -1: all have a copy */

/** @typedef {{width: number, height: number, boxes: PartBox[], empty: string}} Drawing of a tensor's parts */

/**
 * @typedef {object} Tensor
 * @property {string} name
 * @property {string} role such as `parameter`
 * @property {string} kind one of `KINDS`
 * @property {string} shape
 * @property {string} placement such as `rows over dp (4)`
 * @property {string} local bytes per rank, as text
 * @property {number} bytes in all
 * @property {string} total the same, as text
 * @property {number} drawing index, because many tensors are alike
 */

/** @typedef {{tensors: Tensor[], drawings: Drawing[]}} Tensors */

/**
 * The content that the kernel sends.
 *
 * @typedef {Tensors & {heading: string, mesh: Mesh, totals: {ranks: string, size: string, share: number}[], notes: string[],
 *   updates: number}} Content
 */

/**
 * The tensors whose name, role, kind or placement contains each word of the filter.
 *
 * @param {Tensor[]} tensors
 * @param {string} filter
 */
export function filterTensors(tensors, filter) {
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  return tensors.filter((tensor) => {
    const text = `${tensor.name} ${tensor.role} ${tensor.kind} ${tensor.placement}`.toLowerCase();
    return words.every((word) => text.includes(word));
  });
}

/** @typedef {{name: string, key: string, tensors: Tensor[]}} Alike tensors of repeated blocks */

const BLOCK_NUMBER = /(?<![A-Za-z0-9])\d+(?![A-Za-z0-9])|(?<=[A-Za-z])\d+(?=\.|$)/;

/**
 * Tensors in order; those that differ only by one number in their names are together, where the first of them is.
 *
 * @param {Tensor[]} tensors
 * @returns {Alike[]}
 */
export function foldTensors(tensors) {
  /** @type {Map<string, Tensor[]>} */
  const groups = new Map();
  for (const tensor of tensors) {
    const { name, role, shape, placement, local, drawing } = tensor;
    const key = [name.replace(BLOCK_NUMBER, "{}"), role, shape, placement, local, drawing].join("\n");
    const group = groups.get(key);
    if (group) group.push(tensor);
    else groups.set(key, [tensor]);
  }
  return [...groups].map(([key, own]) => ({ name: nameOfAll(own), key, tensors: own }));
}

/** @param {Tensor[]} tensors */
function nameOfAll(tensors) {
  const [{ name }] = tensors;
  if (tensors.length === 1) return name;
  const numbers = tensors.map((tensor) => Number(tensor.name.match(BLOCK_NUMBER)?.[0])).sort((a, b) => a - b);
  /** @type {[number, number][]} */
  const ranges = [];
  for (const number of numbers) {
    const last = ranges[ranges.length - 1];
    if (last && last[1] + 1 === number) last[1] = number;
    else ranges.push([number, number]);
  }
  return name.replace(BLOCK_NUMBER, ranges.map(([a, b]) => (a === b ? `${a}` : `${a}-${b}`)).join(","));
}

/**
 * Squarified treemap (Bruls, Huizing and van Wijk, 2000): a rectangle per value, with areas in proportion.
 *
 * @param {number[]} values
 * @param {number} width
 * @param {number} height
 */
export function treemap(values, width, height) {
  const total = values.reduce((sum, value) => sum + value, 0);
  const boxes = values.map(() => ({ x: 0, y: 0, width: 0, height: 0 }));
  if (!total || !width || !height) return boxes;
  const areas = values.map((value) => (value * width * height) / total);
  const order = values.map((_, i) => i).sort((a, b) => values[b] - values[a]);
  let free = { x: 0, y: 0, width, height };
  /** @type {number[]} */
  let row = [];
  for (const i of order) {
    if (!values[i]) break;
    if (row.length && worstRatio([...row, i], areas, free) > worstRatio(row, areas, free)) {
      free = placeRow(row, areas, free, boxes);
      row = [];
    }
    row.push(i);
  }
  if (row.length) placeRow(row, areas, free, boxes);
  return boxes;
}

/** @typedef {{name: string, bytes: number, index: number, children: Group[]}} Group index of a tensor; -1: of none */

/**
 * Tensors as a tree of modules, by the parts of their names; modules with one child are one with it.
 *
 * @param {{name: string, bytes: number}[]} tensors
 * @returns {Group}
 */
export function groupByModule(tensors) {
  /** @type {(name: string) => Group} */
  const make = (name) => ({ name, bytes: 0, index: -1, children: [] });
  const root = make("");
  tensors.forEach(({ name, bytes }, index) => {
    let group = root;
    group.bytes += bytes;
    const parts = name.split(".");
    parts.forEach((part, depth) => {
      const isLeaf = depth === parts.length - 1;
      let child = isLeaf ? undefined : group.children.find((each) => each.name === part && each.index < 0);
      if (!child) {
        child = make(part);
        group.children.push(child);
      }
      child.bytes += bytes;
      if (isLeaf) child.index = index;
      group = child;
    });
  });
  return join(root);
}

/**
 * @param {Group} group
 * @returns {Group}
 */
function join(group) {
  const children = group.children.map(join);
  if (children.length !== 1 || group.index >= 0) return { ...group, children };
  const [only] = children;
  return { ...only, name: group.name ? `${group.name}.${only.name}` : only.name };
}

/**
 * @typedef {Box & {index: number, label: string, isTurned?: boolean, depth: number}} Tile of a tensor, or of a module
 *   (index -1); a turned label goes from top to bottom
 */

const TITLE = { height: 16, minWidth: 46, minHeight: 40 };
const GAP = 2;
const TILE_LETTER = 6.3; // pixels

/**
 * A treemap of modules within modules, with a title for each that has room; names lose their start, not their end.
 *
 * @param {{name: string, bytes: number}[]} tensors
 * @param {number} width
 * @param {number} height
 */
export function nestedTreemap(tensors, width, height) {
  /** @type {Tile[]} */
  const tiles = [];
  /** @type {(group: Group, box: Box, depth: number) => void} */
  const place = (group, box, depth) => {
    if (group.index >= 0) {
      const fit = (/** @type {number} */ length, /** @type {number} */ other) =>
        other >= 15 ? shortName(group.name, Math.floor((length - 8) / TILE_LETTER)) : "";
      const across = fit(box.width, box.height);
      const label = across || fit(box.height, box.width);
      tiles.push({ ...box, index: group.index, label, isTurned: !across && label !== "", depth });
      return;
    }
    const hasTitle = depth > 0 && box.width >= TITLE.minWidth && box.height >= TITLE.minHeight;
    const label = hasTitle ? shortName(group.name, Math.floor((box.width - 8) / TILE_LETTER)) : "";
    if (depth) tiles.push({ ...box, index: -1, label, depth });
    const hasMargin = depth > 0 && Math.min(box.width, box.height) > 4 * GAP;
    const [inset, top] = [hasMargin ? GAP : 0, hasTitle ? TITLE.height : hasMargin ? GAP : 0];
    const bytes = group.children.map((child) => child.bytes);
    treemap(bytes, box.width - 2 * inset, box.height - top - inset).forEach((child, i) => {
      place(group.children[i], { ...child, x: box.x + inset + child.x, y: box.y + top + child.y }, depth + 1);
    });
  };
  place(groupByModule(tensors), { x: 0, y: 0, width, height }, 0);
  return tiles;
}

/**
 * The last parts of a name that fit into this many letters, of an optimizer's at least what it is; empty: none fit.
 *
 * @param {string} name
 * @param {number} letters
 */
export function shortName(name, letters) {
  const parts = name.split(".");
  for (let i = 0; i < parts.length; i++) {
    const rest = parts.slice(i).join(".");
    if (rest.length <= letters) return rest;
  }
  const state = name.split(": ").at(-1) ?? "";
  return state.length <= letters ? state : "";
}

/**
 * The worst aspect ratio of boxes in a row along the shorter side of the free space.
 *
 * @param {number[]} row indices
 * @param {number[]} areas
 * @param {Box} free
 */
function worstRatio(row, areas, free) {
  const rowAreas = row.map((i) => areas[i]);
  const sum = rowAreas.reduce((a, b) => a + b, 0);
  const square = Math.min(free.width, free.height) ** 2;
  return Math.max((square * Math.max(...rowAreas)) / (sum * sum), (sum * sum) / (square * Math.min(...rowAreas)));
}

/**
 * Place a row along the shorter side of the free space; returns the remaining free space.
 *
 * @param {number[]} row indices
 * @param {number[]} areas
 * @param {Box} free
 * @param {Box[]} boxes
 * @returns {Box}
 */
function placeRow(row, areas, free, boxes) {
  const isColumn = free.width >= free.height;
  const thickness = row.reduce((sum, i) => sum + areas[i], 0) / Math.min(free.width, free.height);
  let offset = isColumn ? free.y : free.x;
  for (const i of row) {
    const length = areas[i] / thickness;
    boxes[i] = isColumn
      ? { x: free.x, y: offset, width: thickness, height: length }
      : { x: offset, y: free.y, width: length, height: thickness };
    offset += length;
  }
  return isColumn
    ? { ...free, x: free.x + thickness, width: Math.max(0, free.width - thickness) }
    : { ...free, y: free.y + thickness, height: Math.max(0, free.height - thickness) };
}

/**
 * A tensor's unique key.
 *
 * @param {Pick<Tensor, "role" | "name">} tensor
 */
export function keyOf({ role, name }) {
  return `${role} ${name}`;
}

/**
 * The keys of tensors whose parts have changed.
 *
 * @param {Tensors | null} before
 * @param {Tensors} after
 */
export function changedTensors(before, after) {
  /** @type {Set<string>} */
  const none = new Set();
  if (!before) return none;
  /** @type {(content: Tensors, tensor: Tensor) => string} */
  const partsOf = ({ drawings }, tensor) => `${tensor.placement} ${JSON.stringify(drawings[tensor.drawing])}`;
  const earlier = new Map(before.tensors.map((tensor) => [keyOf(tensor), partsOf(before, tensor)]));
  return new Set(after.tensors.filter((tensor) => earlier.get(keyOf(tensor)) !== partsOf(after, tensor)).map(keyOf));
}
