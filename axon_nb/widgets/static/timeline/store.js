// @ts-check
// The spans of a timeline as columns, as the kernel sends them.

import { unpack } from "../shared/wire.js";
import { updateBlocks } from "./blocks.js";

/** @import { Paint as Look } from "../shared/canvas.js" */
/** @import { Cell, Figure, Notice } from "../shared/card.js" */

/** @typedef {Look & {kind: string, label: string, lane: number}} Paint lane: 0 code, 1 communication, -1 the cell */

/**
 * What does not change while a timeline is shown.
 *
 * @typedef {object} Config
 * @property {number[]} ranks rows, from the top
 * @property {string} title
 * @property {Paint[]} paints by the code of a kind
 */

/** @typedef {"start" | "duration" | "bytes" | "late" | "sequence" | "label" | "rank" | "line" | "stage" | "microbatch" | "by"}
 *   ColumnName */

/** @typedef {Float64Array | Float32Array | Uint32Array | Uint16Array | Int16Array} Column */

/**
 * Spans, with a column per field: start, duration and late in seconds; for `late` it waited for rank `by`; sequence is
 * that of a collective in its group, 0 if unknown; label by number; line of the
 * cell that called it, 0 if unknown; stage, microbatch and by are -1 if there is none.
 *
 * @typedef {Record<ColumnName, Column>} Columns
 */

/** @typedef {[code: number, name: string, group: string]} Label shared by many spans */

/**
 * @typedef {object} Facts
 * @property {Figure[]} figures
 * @property {(Notice & {filter: string}) | null} notice about what costs most, and the words that show it
 * @property {Record<string, number>} shares of the ranks' time by kind, 0 to 1
 * @property {{title: string, token: string}[]} columns of the table
 * @property {{rank: number, cells: Cell[]}[]} rows
 * @property {string[]} notes
 * @property {string[]} [advice] what else would shorten a step, most first
 */

/** @typedef {[row: number, start: number, length: number, code: number, stage: number, microbatch: number,
 *   action: string]} StepBox */

/** @typedef {{title: string, bubble: string, seconds: number, boxes: StepBox[]}} StepRows */

/**
 * The last step of a pipeline, measured and ideal; `above` says how much longer the measured one took, `omitted` is
 * the number of boxes that were left out.
 *
 * @typedef {{text: string, above: string, ranks: number[], seconds: number, rows: StepRows[], omitted: number}}
 *   PipelineStep
 */

/** @typedef {[from: number | null, to: number | null]} Focus the last cell, in seconds; no end: it is running */

/**
 * A message of the kernel, packed by axon_nb/widgets/timeline/view.py.
 *
 * @typedef {object} Message
 * @property {{count: number, patched: number, first: number, oldest: number, labels: Label[], labelsFrom: number,
 *   groups: Record<string, string>, now: number, lost: number, dropped: number, focus: Focus, finished: boolean, cell?: string,
 *   number?: number, restart?: boolean, facts?: Facts, pipelines?: PipelineStep[]}} header
 * @property {Columns} columns
 * @property {{number: Uint32Array, late: Float32Array, by: Int16Array}} patches of earlier spans
 */

/**
 * @typedef {object} Store
 * @property {Columns} columns with room for more than `count` spans
 * @property {number} first number of the first span in the columns; -1: there was no message yet
 * @property {number} count
 * @property {number} skip spans at the start of the columns that the kernel has dropped
 * @property {Label[]} labels
 * @property {Record<string, string>} groups the ranks of process groups, as text
 * @property {Focus} focus
 * @property {Facts | null} facts
 * @property {PipelineStep[]} pipelines
 * @property {number} now the kernel's clock at the last message
 * @property {number} number of the last message
 * @property {number} lost number of spans that came too fast
 * @property {number} dropped number of old spans that the kernel has dropped
 * @property {number} missing number of old spans that were not sent again after a reload
 * @property {boolean} finished
 * @property {string} cell that is shown at first; empty: one that runs, or none
 * @property {number} updates
 * @property {number[]} blockStarts first start in each block of `BLOCK` spans
 * @property {number[]} blockEnds last end in each block
 */

/**
 * @param {DataView} view
 * @returns {Message}
 */
export function decode(view) {
  const { header, nextColumn } = unpack(view);
  const { count, patched } = header;
  const start = nextColumn(Float64Array, count);
  const [length, bytes, late] = [1, 2, 3].map(() => nextColumn(Float32Array, count));
  const sequence = nextColumn(Uint32Array, count);
  const patches = { number: nextColumn(Uint32Array, patched), late: nextColumn(Float32Array, patched) };
  const [label, rank, line] = [1, 2, 3].map(() => nextColumn(Uint16Array, count));
  const [stage, microbatch, by] = [1, 2, 3].map(() => nextColumn(Int16Array, count));
  const columns = { start, duration: length, bytes, late, sequence, label, rank, line, stage, microbatch, by };
  return { header, columns, patches: { ...patches, by: nextColumn(Int16Array, patched) } };
}

/** @type {Record<ColumnName, new (capacity: number) => Column>} */
const TYPES = {
  start: Float64Array,
  duration: Float32Array,
  bytes: Float32Array,
  late: Float32Array,
  sequence: Uint32Array,
  label: Uint16Array,
  rank: Uint16Array,
  line: Uint16Array,
  stage: Int16Array,
  microbatch: Int16Array,
  by: Int16Array,
};
const NAMES = /** @type {ColumnName[]} */ (Object.keys(TYPES));
const MAX_SKIP = 20000; // dropped spans that stay in the columns

/**
 * @param {number} capacity spans
 * @returns {Store}
 */
export function newStore(capacity = 4096) {
  const columns = /** @type {Columns} */ ({});
  for (const name of NAMES) columns[name] = new TYPES[name](capacity);
  return {
    columns,
    first: -1,
    count: 0,
    skip: 0,
    labels: [],
    groups: {},
    focus: [null, null],
    facts: null,
    pipelines: [],
    now: 0,
    number: 0,
    lost: 0,
    dropped: 0,
    missing: 0,
    finished: false,
    cell: "",
    updates: 0,
    blockStarts: [],
    blockEnds: [],
  };
}

/**
 * Make room for a number of spans.
 *
 * @param {Store} store
 * @param {number} count
 */
function reserve(store, count) {
  let capacity = store.columns.start.length;
  if (count <= capacity) return;
  while (capacity < count) capacity *= 2;
  for (const name of NAMES) {
    const wider = new TYPES[name](capacity);
    wider.set(store.columns[name].subarray(0, store.count));
    store.columns[name] = wider;
  }
}

/**
 * Remove spans that the kernel has dropped.
 *
 * @param {Store} store
 * @param {number} oldest number of the oldest span that the kernel still has
 */
function removeDropped(store, oldest) {
  store.skip = Math.min(store.count, Math.max(0, oldest - store.first));
  if (store.skip <= MAX_SKIP) return;
  for (const name of NAMES) store.columns[name].copyWithin(0, store.skip, store.count);
  store.count -= store.skip;
  store.first += store.skip;
  store.skip = 0;
  updateBlocks(store, 0);
}

/**
 * Add a message. Returns false if an earlier one is missing, so that everything must be sent again.
 *
 * @param {Store} store
 * @param {Message} message
 */
export function merge(store, { header, columns, patches }) {
  if (header.restart || (store.first < 0 && header.labelsFrom === 0)) {
    const missing = Math.max(0, header.first - header.oldest);
    Object.assign(store, { first: header.first, count: 0, skip: 0, missing });
    if (header.labelsFrom === 0) Object.assign(store, { labels: [], groups: {} });
  }
  let end = store.first + store.count;
  if (header.first > end && header.first <= header.oldest) {
    Object.assign(store, { first: header.first, count: 0, skip: 0 });
    end = header.first;
  }
  if (store.first < 0 || header.first > end || header.labelsFrom > store.labels.length) return false;
  header.labels.forEach((label, i) => {
    store.labels[header.labelsFrom + i] = label;
  });
  Object.assign(store.groups, header.groups);
  append(store, columns, Math.min(header.count, end - header.first), header.count);
  for (let i = 0; i < header.patched; i++) {
    const at = patches.number[i] - store.first;
    if (at < 0 || at >= store.count) continue;
    store.columns.late[at] = patches.late[i];
    store.columns.by[at] = patches.by[i];
  }
  const { now, lost, dropped, focus, finished, number = 0, cell = "" } = header;
  Object.assign(store, { now, lost, dropped, focus, finished, number, cell });
  store.updates++;
  if (header.facts) store.facts = header.facts;
  if (header.pipelines) store.pipelines = header.pipelines;
  removeDropped(store, header.oldest);
  return true;
}

/**
 * Append columns from a span on.
 *
 * @param {Store} store
 * @param {Columns} columns
 * @param {number} from
 * @param {number} to
 */
function append(store, columns, from, to) {
  const before = store.count;
  reserve(store, before + to - from);
  for (const name of NAMES) store.columns[name].set(columns[name].subarray(from), before);
  store.count += to - from;
  updateBlocks(store, before);
}
