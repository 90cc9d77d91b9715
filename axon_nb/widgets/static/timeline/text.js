// @ts-check
// Descriptions of spans, and spans as a trace for other tools.

import { formatBytes, formatDuration } from "../shared/format.js";
import { extent } from "./store.js";

/** @import { Config, Store } from "./store.js" */

/**
 * One span in full.
 *
 * @param {Store} store
 * @param {number} i
 * @param {Config} config
 * @param {number} zero the time labelled 0, in seconds
 */
export function describe(store, i, config, zero = 0) {
  const { start, duration: length, bytes, late, label, rank, stage, microbatch, by } = store.columns;
  const [code, name, group] = store.labels[label[i]];
  const { kind, label: kindName } = config.paints[code];
  const parts = [`rank ${rank[i]}`];
  if (kind === "wait") parts.push(stage[i] >= 0 ? `waits for message ${name}` : `waits in ${name}`);
  else parts.push(name === kind || name === kindName ? kindName : kind === "collective" ? name : `${kindName} ${name}`);
  parts.push(formatDuration(length[i]));
  if (stage[i] >= 0) parts.push(`stage ${stage[i]}, microbatch ${microbatch[i]}`);
  if (bytes[i] > 0) parts.push(formatBytes(bytes[i]));
  if (group && kind !== "wait") parts.push(`group ${group}${store.groups[group] ? ` (${store.groups[group]})` : ""}`);
  if (by[i] === rank[i]) parts.push("came last");
  else if (by[i] >= 0) parts.push(`waited ${formatDuration(late[i])} for rank ${by[i]}`);
  parts.push(`at ${(start[i] - zero).toFixed(length[i] < 0.01 ? 4 : 2)} s`);
  return parts.join(" · ");
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
