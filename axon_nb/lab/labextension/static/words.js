// @ts-check
// The panel's short texts.

/** @import { Cluster, Status } from "./monitor.js" */

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** @param {number} count */
export const countRanks = (count) => (count === 1 ? "1 rank" : `${count} ranks`);

/**
 * The state of a cluster in a few words, such as "4 ranks, running In [5]".
 *
 * @param {Cluster} cluster
 * @param {Status | null} status null: its notebook does not reply
 */
export function summarize(cluster, status) {
  const ranks = countRanks(cluster.num_ranks);
  if (!status) return `${ranks}, ${cluster.state === "detached" ? "detached" : "no reply"}`;
  const parts = [ranks, describeWork(status)];
  if (status.dead) parts.push(`${nameRanks(status.dead)} dead`);
  if (status.slowed) parts.push(`slowed: ${status.slowed}`);
  return parts.join(", ");
}

/** @param {Status} status */
function describeWork(status) {
  if (!status.running) return "stopped";
  if (!status.busy) return "idle";
  const cells = new Set(status.ranks.map((rank) => rank.cell).filter((cell) => cell !== null));
  const name = cells.size === 1 ? `In [${[...cells][0]}]` : "";
  if (isPaused(status)) return name ? `${name} is paused` : "paused";
  return name ? `running ${name}` : "running";
}

/**
 * Whether a rank has stopped at a breakpoint, so that nothing goes on before somebody types.
 *
 * @param {Status} status
 */
export function isPaused(status) {
  return status.ranks.some(({ state }) => state.startsWith("paused"));
}

/**
 * A rank's state for a narrow row. The panel's verdict says in which call ranks wait; the width changes little with time.
 *
 * @param {string} state such as "waiting in all_reduce at line 4 for rank 1, for 12.1 s"
 */
export function shortState(state) {
  const [, who, seconds] = state.match(/^waiting in .* for (.+), for ([\d.]+) s$/) ?? [];
  if (!who) return unbroken(state);
  return unbroken(`waits for ${who} ·\u00a0${Number(seconds) < 10 ? seconds : Math.round(Number(seconds))} s`);
}

/**
 * Text whose ranges of ranks and durations are not broken between lines.
 *
 * @param {string} text
 */
export function unbroken(text) {
  return text.replace(/(\d)-(?=\d)/g, "$1\u2011").replace(/(\d) (s|min|h)\b/g, "$1\u00a0$2");
}

/** @param {string} ranks such as "0,2-3" */
export const nameRanks = (ranks) => (/^\d+$/.test(ranks) ? `rank ${ranks}` : `ranks ${ranks}`);

/**
 * The numbers of "0,2-3".
 *
 * @param {string} ranks
 */
export function expandRanks(ranks) {
  return ranks.split(",").flatMap((part) => {
    const [first, last = first] = part.split("-").map(Number);
    return part ? Array.from({ length: last - first + 1 }, (_, i) => first + i) : [];
  });
}

/**
 * Bytes in binary units with three digits.
 *
 * @param {number} bytes
 */
export function formatBytes(bytes) {
  if (!bytes) return "–";
  const power = Math.min(Math.floor(Math.log2(bytes) / 10), UNITS.length - 1);
  const value = bytes / 1024 ** power;
  return `${value.toFixed(value < 9.995 && power ? 2 : value < 99.95 && power ? 1 : 0)} ${UNITS[power]}`;
}

/**
 * Where another cluster is in use.
 *
 * @param {Cluster} cluster
 */
export function describeUse(cluster) {
  if (cluster.state === "attached") return "in use";
  return cluster.state === "detached" ? "detached" : "its agent does not reply";
}
