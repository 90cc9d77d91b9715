// @ts-check
// The rows of a timeline: one per rank; many ranks are folded into groups, except for those that matter.

/** @typedef {{name: string, ranks: number[], block: number}} Row block: number of its group, which can be folded; or -1 */

/**
 * `rowOf` and `indexOf`: the row of each rank, and its place among all ranks; -1: none.
 *
 * @typedef {{list: Row[], rowOf: Int16Array, indexOf: Int16Array}} Rows
 */

const MIN_FOLDED = 32; // ranks
const MAX_BLOCKS = 8;
const MIN_BLOCK = 8; // ranks

/**
 * A row for each rank.
 *
 * @param {number[]} ranks
 */
export function everyRow(ranks) {
  return index(
    ranks,
    ranks.map((rank) => ({ name: `rank ${rank}`, ranks: [rank], block: -1 })),
  );
}

/**
 * Rows of many ranks: one per group of neighbours, or per rank of an open group; some ranks have rows above them.
 *
 * @param {number[]} ranks
 * @param {Set<number>} open numbers of groups
 * @param {number[]} apart ranks
 * @returns {Rows}
 */
export function foldRows(ranks, open, apart) {
  if (ranks.length < MIN_FOLDED) return everyRow(ranks);
  const size = Math.max(MIN_BLOCK, 2 ** Math.ceil(Math.log2(ranks.length / MAX_BLOCKS)));
  const above = apart.filter((rank) => ranks.includes(rank));
  /** @type {Row[]} */
  const list = above.map((rank) => ({ name: `rank ${rank}`, ranks: [rank], block: -1 }));
  for (let block = 0; block * size < ranks.length; block++) {
    const own = ranks.slice(block * size, (block + 1) * size);
    const rest = own.filter((rank) => !above.includes(rank));
    if (!rest.length) continue;
    const name = `${own[0]}–${own[own.length - 1]}`;
    if (open.has(block)) {
      rest.forEach((rank, i) => {
        list.push({ name: `rank ${rank}`, ranks: [rank], block: i ? -1 : block });
      });
    } else {
      list.push({ name: rest.length === own.length ? name : `${name} (${rest.length})`, ranks: rest, block });
    }
  }
  return index(ranks, list);
}

/**
 * @param {number[]} ranks
 * @param {Row[]} list
 * @returns {Rows}
 */
function index(ranks, list) {
  const places = () => new Int16Array(Math.max(0, ...ranks) + 1).fill(-1);
  const [rowOf, indexOf] = [places(), places()];
  list.forEach((row, i) => {
    for (const rank of row.ranks) rowOf[rank] = i;
  });
  ranks.forEach((rank, i) => {
    indexOf[rank] = i;
  });
  return { list, rowOf, indexOf };
}
