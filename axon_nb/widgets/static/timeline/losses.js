// @ts-check
// Which spans are missing, as text.

/** @import { Store } from "./store.js" */

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
  if (lost) notes.push(`${spans(lost, "span")} lost: too many arrived at once`);
  return notes.join(" · ");
}
