// @ts-check
// The visible timeline as a picture: its heading, overview, axis and rows on one canvas.

import { getContext } from "../../shared/canvas.js";

/** @import { Theme } from "../../shared/theme.js" */
/** @import { Rows } from "../rows.js" */

/**
 * @typedef {object} PictureParts
 * @property {HTMLCanvasElement} overview
 * @property {HTMLCanvasElement} axis
 * @property {HTMLCanvasElement} canvas the rows
 * @property {HTMLElement} elapsed says what is shown
 */

const MARGIN = 12; // pixels of the page
const TITLE = 26;

/**
 * @param {PictureParts} parts
 * @param {{theme: Theme, rows: Rows, geometry: {height: number}}} view
 */
export function drawPicture({ overview, axis, canvas, elapsed }, { theme, rows, geometry }) {
  const ratio = canvas.width / canvas.clientWidth;
  const left = MARGIN + 84;
  const picture = document.createElement("canvas");
  const drawn = [overview, axis, canvas];
  picture.width = Math.round((left + canvas.clientWidth + MARGIN) * ratio);
  picture.height = drawn.reduce((sum, { height }) => sum + height, 0) + Math.round((TITLE + 2 * MARGIN) * ratio);
  const context = getContext(picture);
  context.fillStyle = theme.of("page");
  context.fillRect(0, 0, picture.width, picture.height);
  context.fillStyle = theme.ink;
  context.textBaseline = "middle";
  context.font = `600 ${13 * ratio}px ${theme.font}`;
  context.fillText(`Timeline · ${elapsed.textContent}`, MARGIN * ratio, (MARGIN + TITLE / 2) * ratio);
  let top = Math.round((MARGIN + TITLE) * ratio);
  for (const own of drawn) {
    if (own === canvas) {
      context.font = `600 ${12 * ratio}px ${theme.font}`;
      rows.list.forEach(({ name }, row) => {
        context.fillText(name, MARGIN * ratio, top + (row + 0.5) * geometry.height * ratio, 76 * ratio);
      });
    }
    context.drawImage(own, Math.round(left * ratio), top);
    top += own.height;
  }
  return picture;
}
