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
  return cells.size === 1 ? `running In [${[...cells][0]}]` : "running";
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
