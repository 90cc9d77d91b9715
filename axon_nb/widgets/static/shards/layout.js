// @ts-check
// Which rank holds which part of which tensor: what is shown of it, and where.

/** @typedef {{x: number, y: number, width: number, height: number}} Box */

/** @typedef {Box & {words: string, color: string, ink: string, pattern: string, label: string}} PartBox */

/** @typedef {{width: number, height: number, boxes: PartBox[], empty: string}} Drawing of a tensor's parts */

/**
 * @typedef {object} Tensor
 * @property {string} name
 * @property {string} role such as `parameter`
 * @property {string} kind one of `KINDS`
 * @property {string} shape
 * @property {string} where in words
 * @property {string} each bytes on a rank, in words
 * @property {number} bytes in all
 * @property {string} total the same in words
 * @property {number} drawing index, as many tensors are alike
 */

/** @typedef {{tensors: Tensor[], drawings: Drawing[]}} Tensors */

/**
 * What the kernel sends.
 *
 * @typedef {Tensors & {heading: string, totals: {ranks: string, size: string, part: number}[], notes: string[],
 *   updates: number}} Content
 */

/**
 * The tensors whose name, role or place has each word of the filter.
 *
 * @param {Tensor[]} tensors
 * @param {string} filter
 */
export function matching(tensors, filter) {
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  return tensors.filter((tensor) => {
    const text = `${tensor.name} ${tensor.role} ${tensor.kind} ${tensor.where}`.toLowerCase();
    return words.every((word) => text.includes(word));
  });
}

/**
 * Squarified treemap (Bruls, Huizing and van Wijk, 2000): a rectangle for each value, areas in proportion.
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

/**
 * The aspect ratio of the least square box, if these were a row along the shorter side of what is free.
 *
 * @param {number[]} row indices
 * @param {number[]} areas
 * @param {Box} free
 */
function worstRatio(row, areas, free) {
  const own = row.map((i) => areas[i]);
  const sum = own.reduce((a, b) => a + b, 0);
  const square = Math.min(free.width, free.height) ** 2;
  return Math.max((square * Math.max(...own)) / (sum * sum), (sum * sum) / (square * Math.min(...own)));
}

/**
 * Place a row along the shorter side of what is free; returns what is free then.
 *
 * @param {number[]} row indices
 * @param {number[]} areas
 * @param {Box} free
 * @param {Box[]} boxes
 * @returns {Box}
 */
function placeRow(row, areas, free, boxes) {
  const beside = free.width >= free.height;
  const thick = row.reduce((sum, i) => sum + areas[i], 0) / Math.min(free.width, free.height);
  let along = beside ? free.y : free.x;
  for (const i of row) {
    const long = areas[i] / thick;
    boxes[i] = beside
      ? { x: free.x, y: along, width: thick, height: long }
      : { x: along, y: free.y, width: long, height: thick };
    along += long;
  }
  return beside
    ? { ...free, x: free.x + thick, width: Math.max(0, free.width - thick) }
    : { ...free, y: free.y + thick, height: Math.max(0, free.height - thick) };
}

/**
 * A tensor's key among all.
 *
 * @param {Pick<Tensor, "role" | "name">} tensor
 */
export function keyOf({ role, name }) {
  return `${role} ${name}`;
}

/**
 * Which tensors lie differently than before, by role and name.
 *
 * @param {Tensors | null} before
 * @param {Tensors} after
 */
export function changed(before, after) {
  /** @type {Set<string>} */
  const none = new Set();
  if (!before) return none;
  /** @type {(content: Tensors, tensor: Tensor) => string} */
  const place = ({ drawings }, tensor) => `${tensor.where} ${JSON.stringify(drawings[tensor.drawing])}`;
  const known = new Map(before.tensors.map((tensor) => [keyOf(tensor), place(before, tensor)]));
  return new Set(after.tensors.filter((tensor) => known.get(keyOf(tensor)) !== place(after, tensor)).map(keyOf));
}
