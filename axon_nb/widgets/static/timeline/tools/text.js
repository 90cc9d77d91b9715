// @ts-check
// Descriptions of spans.

import { formatBytes, formatDuration } from "../../shared/format.js";

/** @import { Tail } from "../derived.js" */
/** @import { Config, Store } from "../store.js" */

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
  const { start, duration: length, bytes, late, label, rank, line, stage, microbatch, by } = store.columns;
  const [code, name, group] = store.labels[label[i]];
  const { kind, label: kindName } = config.paints[code];
  const isPlain = name === kind || name === kindName;
  const waits = stage[i] >= 0 ? `waits for message ${name}` : `waits in ${name}`;
  const hasOwnName = kind === "collective" || kind === "other";
  const title = kind === "wait" ? waits : isPlain ? kindName : hasOwnName ? name : `${kindName} ${name}`;
  /** @type {[string, string][]} */
  const pairs = [
    ["rank", String(rank[i])],
    ["took", formatDuration(length[i])],
  ];
  if (tail) pairs.push(["of it waiting", formatDuration(tail.to - tail.from)]);
  if (stage[i] >= 0) pairs.push(["stage", String(stage[i])]);
  if (microbatch[i] >= 0) pairs.push(["microbatch", String(microbatch[i])]);
  if (by[i] === rank[i]) pairs.push(["came", "last"]);
  else if (by[i] >= 0) pairs.push([`waited for rank ${by[i]}`, formatDuration(late[i])]);
  if (bytes[i] > 0) pairs.push(["moved", formatBytes(bytes[i])]);
  if (bytes[i] > 0 && length[i] > late[i]) pairs.push(["rate", `${formatBytes(bytes[i] / (length[i] - late[i]))}/s`]);
  if (group && kind !== "wait") pairs.push(["group", store.groups[group] || group]);
  if (line[i]) pairs.push(["called at", `line ${line[i]}`]);
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
