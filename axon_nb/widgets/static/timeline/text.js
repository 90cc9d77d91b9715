// @ts-check
// Descriptions of spans, and spans as a trace for other tools.

import { formatBytes, formatDuration } from "../shared/format.js";
import { extent } from "./blocks.js";

/** @import { Tail } from "./derived.js" */
/** @import { Config, Store } from "./store.js" */

/**
 * One span in full: what it is, and facts with their names.
 *
 * @param {Store} store
 * @param {number} i
 * @param {Config} config
 * @param {number} zero the time labelled 0, in seconds
 * @param {Tail} [tail] the end of a backward, where it only waits
 */
export function spanFacts(store, i, config, zero = 0, tail = undefined) {
  const { start, duration: length, bytes, late, label, rank, stage, microbatch, by } = store.columns;
  const [code, name, group] = store.labels[label[i]];
  const { kind, label: kindName } = config.paints[code];
  const isPlain = name === kind || name === kindName;
  const waits = stage[i] >= 0 ? `waits for message ${name}` : `waits in ${name}`;
  const title = kind === "wait" ? waits : isPlain ? kindName : kind === "collective" ? name : `${kindName} ${name}`;
  /** @type {[string, string][]} */
  const pairs = [
    ["rank", String(rank[i])],
    ["took", formatDuration(length[i])],
  ];
  if (tail) pairs.push(["of it waiting", formatDuration(tail.to - tail.from)]);
  if (stage[i] >= 0) pairs.push(["stage", String(stage[i])], ["microbatch", String(microbatch[i])]);
  if (by[i] === rank[i]) pairs.push(["came", "last"]);
  else if (by[i] >= 0) pairs.push([`waited for rank ${by[i]}`, formatDuration(late[i])]);
  if (bytes[i] > 0) pairs.push(["moved", formatBytes(bytes[i])]);
  if (bytes[i] > 0 && length[i] > late[i]) pairs.push(["rate", `${formatBytes(bytes[i] / (length[i] - late[i]))}/s`]);
  if (group && kind !== "wait") pairs.push(["group", store.groups[group] || group]);
  pairs.push(["at", `${(start[i] - zero).toFixed(length[i] < 0.01 ? 4 : 2)} s`]);
  return { title, pairs };
}

/**
 * One span in full, as a sentence.
 *
 * @param {Store} store
 * @param {number} i
 * @param {Config} config
 * @param {number} zero the time labelled 0, in seconds
 */
export function describe(store, i, config, zero = 0) {
  const { title, pairs } = spanFacts(store, i, config, zero);
  return [title, ...pairs.map((pair) => pair.join(" "))].join(" · ");
}

/**
 * A count with its verb, such as "1 span was".
 *
 * @param {number} count
 * @param {string} noun
 */
const spans = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? " was" : "s were"}`;

/**
 * Describe which spans are missing.
 *
 * @param {Store} store
 */
export function losses({ dropped, missing, lost }) {
  const notes = [];
  if (dropped) notes.push(`${spans(dropped, "older span")} dropped`);
  if (missing) notes.push(`${spans(missing, "older span")} not loaded again`);
  if (lost) notes.push(`${spans(lost, "span")} lost: too many came at once`);
  return notes.join(" · ");
}

/**
 * The spans as a trace for Perfetto, in microseconds from the first one on.
 *
 * @param {Store} store
 * @param {Config} config
 */
export function chromeTrace(store, config) {
  const { columns, labels } = store;
  const { from } = extent(store, 0);
  /** @type {Record<string, unknown>[]} */
  const events = [];
  for (const rank of config.ranks) {
    events.push({ name: "process_name", ph: "M", pid: rank, args: { name: `rank ${rank}` } });
  }
  for (let i = store.skip; i < store.count; i++) {
    const [code, name, group] = labels[columns.label[i]];
    const { kind } = config.paints[code];
    /** @type {Record<string, string | number>} */
    const args = {};
    if (group) args.group = group;
    if (columns.bytes[i]) args.bytes = columns.bytes[i];
    if (columns.stage[i] >= 0) Object.assign(args, { stage: columns.stage[i], microbatch: columns.microbatch[i] });
    if (columns.by[i] >= 0) Object.assign(args, { waited_us: columns.late[i] * 1e6, waited_for: columns.by[i] });
    const times = { ts: (columns.start[i] - from) * 1e6, dur: columns.duration[i] * 1e6 };
    events.push({ name, cat: kind, ph: "X", ...times, pid: columns.rank[i], tid: kind, args });
  }
  return { traceEvents: events, displayTimeUnit: "ms" };
}
