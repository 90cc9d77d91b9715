// @ts-check
// Where words fit on spans, so that none is written over another.

/** @import { Run } from "../shared/time_axis.js" */

/** @typedef {{index: number, kind: number, left: number, right: number}} LabelBox of a span in a lane, device pixels */

/** @typedef {{index: number, left: number, right: number}} Room for the words of a span */

/**
 * The free room of each span of a lane: within a run of its own kind, and in no other span that may be written on.
 *
 * @param {LabelBox[]} boxes
 * @param {Run[]} runs of the lane, from left to right
 * @param {number} minWidth
 */
export function labelRooms(boxes, runs, minWidth) {
  const ordered = boxes.filter(({ left, right }) => right - left >= minWidth).sort((a, b) => a.left - b.left);
  /** @type {Room[]} */
  const rooms = [];
  let taken = -Infinity;
  let firstRun = 0;
  ordered.forEach(({ index, kind, left, right }, i) => {
    const from = Math.max(left, taken);
    const to = Math.min(right, ordered[i + 1]?.left ?? Infinity);
    while (firstRun < runs.length && runs[firstRun].right <= left) firstRun++;
    let [bestFrom, bestTo] = [0, 0];
    for (let r = firstRun; r < runs.length && runs[r].left < to; r++) {
      if (runs[r].kind !== kind) continue;
      const [a, b] = [Math.max(from, runs[r].left), Math.min(to, runs[r].right)];
      if (b - a > bestTo - bestFrom) [bestFrom, bestTo] = [a, b];
    }
    if (bestTo - bestFrom < minWidth) return;
    rooms.push({ index, left: bestFrom, right: bestTo });
    taken = bestTo;
  });
  return rooms;
}

/** @type {Record<string, string>} */
const SHORT = { forward: "fwd", backward: "bwd", optimizer: "opt" };

/**
 * What may be written on a span, the longest first.
 *
 * @param {string} kind
 * @param {string} name
 * @param {number} microbatch -1: none
 */
export function wordsFor(kind, name, microbatch) {
  if (microbatch >= 0) return [`${name} ${microbatch}`, String(microbatch)];
  return SHORT[kind] ? [...new Set([name, kind, SHORT[kind]])] : [name];
}
