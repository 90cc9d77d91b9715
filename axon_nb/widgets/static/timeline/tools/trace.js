// @ts-check
// Spans as a trace for other tools.

import { extent } from "../blocks.js";

/** @import { Config, Store } from "../store.js" */

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
    if (columns.stage[i] >= 0) args.stage = columns.stage[i];
    if (columns.microbatch[i] >= 0) args.microbatch = columns.microbatch[i];
    if (columns.by[i] >= 0) Object.assign(args, { waited_us: columns.late[i] * 1e6, waited_for: columns.by[i] });
    const times = { ts: (columns.start[i] - from) * 1e6, dur: columns.duration[i] * 1e6 };
    events.push({ name, cat: kind, ph: "X", ...times, pid: columns.rank[i], tid: kind, args });
  }
  return { traceEvents: events, displayTimeUnit: "ms" };
}
