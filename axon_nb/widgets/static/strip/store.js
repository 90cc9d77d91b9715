// @ts-check
// The data of a strip: what each rank did over time, and its text.

import { formatSeconds } from "../shared/format.js";
import { unpack } from "../shared/wire.js";

/** @import { Paint as Look } from "../shared/canvas.js" */

/** @typedef {Look & {name: string, label: string, terminal: boolean}} Paint terminal: nothing follows it */

/**
 * What does not change while a strip is shown.
 *
 * @typedef {object} Config
 * @property {number[]} ranks rows, from the top
 * @property {string} title
 * @property {number} silence seconds without a sample after which an activity is unknown
 * @property {Paint[]} paints by the code of an activity
 */

/**
 * What a rank did for a while; times in seconds from the cell's start.
 *
 * @typedef {object} Segment
 * @property {number} start
 * @property {number} end of the last sample
 * @property {number} since when the rank has been in this call
 * @property {number} line of the last sample
 * @property {number} low first line
 * @property {number} high last line
 * @property {string} call
 * @property {number} activity code: index of its paint
 * @property {boolean} mixed whether shorter segments of other activities were merged into it
 */

/** @typedef {{generation: number, segments: Segment[]}} Row */

/**
 * @typedef {object} Store
 * @property {Row[]} rows
 * @property {number} now the kernel's clock at the last message
 * @property {number} lost number of samples
 * @property {number} coarse the time before which short segments are merged
 * @property {boolean} finished
 */

/**
 * A message of the kernel, packed by axon_nb/widgets/cell/activity.py.
 *
 * @typedef {object} Message
 * @property {{count: number, calls: string[], generations: number[], replaced: number[], now: number, lost: number,
 *   coarse: number, finished: boolean}} header
 * @property {Record<string, ArrayLike<number>>} columns
 */

/**
 * @param {DataView} view
 * @returns {Message}
 */
export function decode(view) {
  const { header, nextColumn } = unpack(view);
  /** @type {Message["columns"]} */
  const columns = {};
  for (const name of ["start", "end", "since"]) columns[name] = nextColumn(Float64Array, header.count);
  for (const name of ["position", "line", "low", "high"]) columns[name] = nextColumn(Uint32Array, header.count);
  for (const name of ["row", "call"]) columns[name] = nextColumn(Uint16Array, header.count);
  for (const name of ["activity", "mixed"]) columns[name] = nextColumn(Uint8Array, header.count);
  return { header, columns };
}

/**
 * @param {number} numRows
 * @returns {Store}
 */
export function newStore(numRows) {
  const rows = Array.from({ length: numRows }, () => ({ generation: 0, segments: [] }));
  return { rows, now: 0, lost: 0, coarse: 0, finished: false };
}

/**
 * Add a message. Returns false if an earlier one is missing, so that everything must be sent again.
 *
 * @param {Store} store
 * @param {Message} message
 */
export function merge(store, { header, columns }) {
  let isComplete = true;
  for (const row of header.replaced) {
    store.rows[row].segments.length = 0;
    store.rows[row].generation = header.generations[row];
  }
  for (let i = 0; i < header.count; i++) {
    const row = columns.row[i];
    const { generation, segments } = store.rows[row];
    const position = columns.position[i];
    if (generation !== header.generations[row] || position > segments.length) {
      isComplete = false;
      continue;
    }
    segments[position] = {
      start: columns.start[i],
      end: columns.end[i],
      since: columns.since[i],
      line: columns.line[i],
      low: columns.low[i],
      high: columns.high[i],
      call: header.calls[columns.call[i]],
      activity: columns.activity[i],
      mixed: columns.mixed[i] === 1,
    };
  }
  const { now, lost, coarse, finished } = header;
  Object.assign(store, { now, lost, coarse, finished });
  return isComplete;
}

// ---- text ----------------------------------------------------------------------------------------------------------

/**
 * When a row's last segment ends: now, as long as samples arrive, or if its activity is terminal.
 *
 * @param {Segment} segment
 * @param {number} now
 * @param {Config} config
 */
export function openEnd(segment, now, config) {
  const continues = config.paints[segment.activity].terminal || now - segment.end <= config.silence;
  return continues ? Math.max(now, segment.end) : segment.end;
}

/**
 * A rank's present state, such as `waiting in all_reduce, line 4, 2.1 s`.
 *
 * @param {Segment[]} segments
 * @param {number} now
 * @param {Config} config
 */
export function describe(segments, now, config) {
  const segment = segments[segments.length - 1];
  if (!segment) return "no sample yet";
  const name = config.paints[segment.activity].name;
  if (name === "done" || name === "failed") return `${name} after ${formatSeconds(segment.start)}`;
  if (name === "dead") return `died after ${formatSeconds(segment.start)}`;
  const end = openEnd(segment, now, config);
  const line = segment.line ? `, line ${segment.line}` : "";
  if (name === "stopped") return `stopped${segment.call ? ` in ${segment.call}` : ""}${line}`;
  const silent = end < now ? `, no sample for ${formatSeconds(now - end)}` : "";
  if (name === "waiting") return `waiting in ${segment.call}${line}, ${formatSeconds(end - segment.since)}${silent}`;
  if (name === "collective") return `in ${segment.call}${line}${silent}`;
  return `${name}${name === "running" || name === "paused" ? line : ""}${silent}`;
}

/**
 * What the ranks of a label are doing now: in full for one, counted for several.
 *
 * @param {{segments: Segment[]}[]} rows
 * @param {number} now
 * @param {Config} config
 */
export function describeRows(rows, now, config) {
  if (rows.length === 1) return describe(rows[0].segments, now, config);
  /** @type {Map<string, number>} */
  const counts = new Map();
  for (const { segments } of rows) {
    const last = segments[segments.length - 1];
    const text = last ? config.paints[last.activity].label : "no sample yet";
    counts.set(text, (counts.get(text) ?? 0) + 1);
  }
  const sorted = [...counts].sort((a, b) => b[1] - a[1]);
  return sorted.map(([text, count]) => `${count} ${text}`).join(", ");
}

/**
 * One segment in full, for the tooltip.
 *
 * @param {number} rank
 * @param {Segment} segment
 * @param {number} end
 * @param {Config} config
 */
export function describeSegment(rank, segment, end, config) {
  const { name } = config.paints[segment.activity];
  const verb = name === "waiting" || name === "stopped" ? `${name} in` : "in";
  const activity = segment.call ? `${verb} ${segment.call}` : name;
  const lines = segment.low === segment.high ? `, line ${segment.low}` : `, lines ${segment.low}–${segment.high}`;
  const time = `${segment.start.toFixed(2)}–${end.toFixed(2)} s (${formatSeconds(end - segment.start)})`;
  return `rank ${rank} · ${segment.mixed ? "mostly " : ""}${activity}${segment.low ? lines : ""} · ${time}`;
}

const LONG_WAIT_S = 5; // in one call; longer ones are announced
const MAX_ALERTS = 8; // that are read out at once

/**
 * What to announce: ranks that failed, died or have waited for long, each once. `announced` stores which.
 *
 * @param {Store} store
 * @param {number} now
 * @param {Config} config
 * @param {Map<number, string>} announced
 */
export function newAlerts(store, now, config, announced) {
  /** @type {string[]} */
  const alerts = [];
  store.rows.forEach(({ segments }, row) => {
    const segment = segments[segments.length - 1];
    if (!segment) return;
    const { name } = config.paints[segment.activity];
    const waits = name === "waiting" && now - segment.since > LONG_WAIT_S;
    const state = name === "failed" || name === "dead" || waits ? name : "";
    if (state && announced.get(row) !== state) {
      alerts.push(`rank ${config.ranks[row]} ${describe(segments, now, config)}`);
    }
    announced.set(row, state);
  });
  const rest = alerts.length - MAX_ALERTS;
  return alerts.slice(0, MAX_ALERTS).join("; ") + (rest > 0 ? `, and ${rest} more` : "");
}
