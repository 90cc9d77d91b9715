// @ts-check
// The spans of `%timeline` as columns, as the kernel sends them.

import { unpack } from "../shared/wire.js";

/** @import { Paint as Colors } from "../shared/canvas.js" */
/** @import { Stretch } from "../shared/time_axis.js" */

/** @typedef {Colors & {kind: string, label: string, lane: number}} Paint lane: 0 code, 1 communication, -1 the cell */

/**
 * What does not change while a timeline is shown.
 *
 * @typedef {object} Config
 * @property {number[]} ranks rows, from the top
 * @property {string} title
 * @property {Paint[]} paints by the code of a kind
 */

/** @typedef {"start" | "duration" | "bytes" | "late" | "label" | "rank" | "stage" | "microbatch" | "by"} ColumnName */

/** @typedef {Float64Array | Float32Array | Uint16Array | Int16Array} Column */

/**
 * Spans, a column for each of their numbers: start, duration and late in seconds, `late` of which it waited for rank
 * `by`; label by number; stage, microbatch and by are -1 where there is none.
 *
 * @typedef {Record<ColumnName, Column>} Columns
 */

/** @typedef {[code: number, name: string, group: string]} Label what many spans have in common */

/** @typedef {{titles: string[], rows: [rank: number, ...cells: string[]][], sentences: string[]}} Facts */

/** @typedef {[row: number, start: number, length: number, code: number, stage: number, microbatch: number,
 *   action: string]} StepBox */

/** @typedef {{title: string, bubble: string, boxes: StepBox[]}} StepRows */

/**
 * The last step of a pipeline: measured, and ideal.
 *
 * @typedef {{words: string, ranks: number[], seconds: number, rows: StepRows[], cut: number}} PipelineStep
 */

/** @typedef {[from: number | null, to: number | null]} Focus the last cell, in seconds; no end: it runs */

/**
 * A message of the kernel, as axon_nb/widgets/timeline/wire.py packs it.
 *
 * @typedef {object} Message
 * @property {{count: number, patched: number, first: number, oldest: number, labels: Label[], labelsFrom: number,
 *   groups: Record<string, string>, now: number, lost: number, dropped: number, focus: Focus, finished: boolean,
 *   number?: number, restart?: boolean, facts?: Facts, pipelines?: PipelineStep[]}} header
 * @property {Columns} columns
 * @property {{number: Uint32Array, late: Float32Array, by: Int16Array}} patches of spans that were sent before
 */

/**
 * @typedef {object} Store
 * @property {Columns} columns with room for more than `count` spans
 * @property {number} first number of the first span in the columns; -1: none has come
 * @property {number} count
 * @property {number} skip spans at the beginning of the columns that the kernel has dropped
 * @property {Label[]} labels
 * @property {Record<string, string>} groups the ranks of process groups, in words
 * @property {Focus} focus
 * @property {Facts | null} facts
 * @property {PipelineStep[]} pipelines
 * @property {number} now the kernel's clock at the last message
 * @property {number} number of the last message
 * @property {number} lost number of spans that came too fast
 * @property {number} dropped number of old spans that the kernel has dropped
 * @property {number} missing number of old spans that were not sent again after a reload
 * @property {boolean} finished
 * @property {number} updates
 * @property {number[]} begins first start in each block of `BLOCK` spans
 * @property {number[]} ends last end in each block
 */

/**
 * @param {DataView} view
 * @returns {Message}
 */
export function decode(view) {
  const { header, take } = unpack(view);
  const { count, patched } = header;
  const start = take(Float64Array, count);
  const [length, bytes, late] = [1, 2, 3].map(() => take(Float32Array, count));
  const patches = { number: take(Uint32Array, patched), late: take(Float32Array, patched) };
  const [label, rank] = [1, 2].map(() => take(Uint16Array, count));
  const [stage, microbatch, by] = [1, 2, 3].map(() => take(Int16Array, count));
  const columns = { start, duration: length, bytes, late, label, rank, stage, microbatch, by };
  return { header, columns, patches: { ...patches, by: take(Int16Array, patched) } };
}

/** @type {Record<ColumnName, new (capacity: number) => Column>} */
const TYPES = {
  start: Float64Array,
  duration: Float32Array,
  bytes: Float32Array,
  late: Float32Array,
  label: Uint16Array,
  rank: Uint16Array,
  stage: Int16Array,
  microbatch: Int16Array,
  by: Int16Array,
};
const NAMES = /** @type {ColumnName[]} */ (Object.keys(TYPES));
const SPARE = 20000; // spans that the kernel has dropped and that still lie here, before they are removed
export const SHORTEST = 0.2; // seconds that the axis spans at least while a cell runs
const BLOCK = 512; // spans of which the first start and the last end are known

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
    updates: 0,
    begins: [],
    ends: [],
  };
}

/**
 * Make room for so many spans.
 *
 * @param {Store} store
 * @param {number} wanted
 */
function grow(store, wanted) {
  let capacity = store.columns.start.length;
  if (wanted <= capacity) return;
  while (capacity < wanted) capacity *= 2;
  for (const name of NAMES) {
    const wider = new TYPES[name](capacity);
    wider.set(store.columns[name].subarray(0, store.count));
    store.columns[name] = wider;
  }
}

/**
 * Note when each block begins and ends, from a span on.
 *
 * @param {Store} store
 * @param {number} from
 */
function index(store, from) {
  const { start, duration: length } = store.columns;
  store.begins.length = store.ends.length = Math.ceil(from / BLOCK);
  for (let i = from; i < store.count; i++) {
    const block = (i / BLOCK) | 0;
    const end = start[i] + length[i];
    if (block === store.begins.length) {
      store.begins.push(start[i]);
      store.ends.push(end);
      continue;
    }
    if (start[i] < store.begins[block]) store.begins[block] = start[i];
    if (end > store.ends[block]) store.ends[block] = end;
  }
}

/**
 * Call `take` with the index of each span that may lie between two times; blocks without any are passed over.
 *
 * @param {Store} store
 * @param {number} from
 * @param {number} to
 * @param {(i: number) => void} take
 */
export function between(store, from, to, take) {
  for (let low = store.skip; low < store.count; ) {
    const block = (low / BLOCK) | 0;
    const high = Math.min(store.count, (block + 1) * BLOCK);
    if (store.begins[block] <= to && store.ends[block] >= from) for (let i = low; i < high; i++) take(i);
    low = high;
  }
}

/**
 * The first start and the last end, or the present while a cell runs.
 *
 * @param {Store} store
 * @param {number} now
 * @returns {Stretch}
 */
export function extent(store, now) {
  const { start, duration: length } = store.columns;
  let from = Infinity;
  let to = -Infinity;
  const first = Math.ceil(store.skip / BLOCK); // a part of the block before is still there
  for (let i = store.skip; i < Math.min(store.count, first * BLOCK); i++) {
    from = Math.min(from, start[i]);
    to = Math.max(to, start[i] + length[i]);
  }
  for (let block = first; block < store.begins.length; block++) {
    from = Math.min(from, store.begins[block]);
    to = Math.max(to, store.ends[block]);
  }
  if (isRunning(store)) to = Math.max(to, now);
  return from < to ? { from, to } : { from: 0, to: SHORTEST };
}

/**
 * Whether a cell runs.
 *
 * @param {Store} store
 */
export function isRunning({ focus }) {
  return focus[0] !== null && focus[1] === null;
}

/**
 * Remove what the kernel has dropped.
 *
 * @param {Store} store
 * @param {number} oldest number of the oldest span that it keeps
 */
function clear(store, oldest) {
  store.skip = Math.min(store.count, Math.max(0, oldest - store.first));
  if (store.skip <= SPARE) return;
  for (const name of NAMES) store.columns[name].copyWithin(0, store.skip, store.count);
  store.count -= store.skip;
  store.first += store.skip;
  store.skip = 0;
  index(store, 0);
}

/**
 * Add a message. Returns false when an earlier one is missing, so that everything has to be sent again.
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
  const { now, lost, dropped, focus, finished, number = 0 } = header;
  Object.assign(store, { now, lost, dropped, focus, finished, number });
  store.updates++;
  if (header.facts) store.facts = header.facts;
  if (header.pipelines) store.pipelines = header.pipelines;
  clear(store, header.oldest);
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
  grow(store, before + to - from);
  for (const name of NAMES) store.columns[name].set(columns[name].subarray(from), before);
  store.count += to - from;
  index(store, before);
}
