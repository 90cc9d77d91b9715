// @ts-check
// The pointer on a canvas: where it is, what it marks, what its tooltip says.

/** @import { Listen } from "./dom.js" */

/** @typedef {{x: number, y: number}} Place of the pointer on a canvas, in pixels of the page */

const LEAST = 4; // pixels that mark a stretch; fewer are a click

/**
 * Follow the pointer on a canvas. A brush shows the stretch that is being marked.
 *
 * @param {Listen} on
 * @param {HTMLCanvasElement} canvas
 * @param {HTMLElement} brush
 * @param {object} handlers
 * @param {(place: Place | null) => void} handlers.moved null: it has left
 * @param {(left: number, right: number) => void} handlers.chose a stretch was marked, in pixels of the page
 * @param {() => number} handlers.height of the brush
 */
export function pointing(on, canvas, brush, { moved, chose, height }) {
  /** @type {Place | null} */
  let place = null;
  /** @type {number | null} */
  let pressed = null;
  const marked = () => {
    if (pressed === null || !place || Math.abs(place.x - pressed) < LEAST) return null;
    return { left: Math.min(pressed, place.x), right: Math.max(pressed, place.x) };
  };
  const show = () => {
    const found = marked();
    brush.hidden = !found;
    if (!found) return;
    brush.style.left = `${canvas.offsetLeft + found.left}px`;
    brush.style.width = `${found.right - found.left}px`;
    brush.style.top = `${canvas.offsetTop}px`;
    brush.style.height = `${height()}px`;
  };
  /** @param {PointerEvent | null} event */
  const move = (event) => {
    place = event && { x: event.offsetX, y: event.offsetY };
    show();
    moved(place);
  };
  const cancel = () => {
    pressed = null;
    show();
  };
  on(canvas, "pointermove", move);
  on(canvas, "pointerleave", () => move(null));
  on(canvas, "pointerdown", (event) => {
    if (event.button !== 0) return;
    pressed = event.offsetX;
    canvas.setPointerCapture(event.pointerId);
  });
  on(canvas, "pointerup", (event) => {
    place = { x: event.offsetX, y: event.offsetY };
    const found = marked();
    if (found) chose(found.left, found.right);
    cancel();
  });
  on(canvas, "pointercancel", cancel);
}

/**
 * Show a text near a place of the view, within its width; no text hides it.
 *
 * @param {HTMLElement} tip
 * @param {HTMLElement} root the view
 * @param {string} text
 * @param {number} left
 * @param {number} top
 */
export function showTip(tip, root, text, left = 0, top = 0) {
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  tip.style.left = `${Math.max(0, Math.min(left, root.clientWidth - tip.offsetWidth))}px`;
  tip.style.top = `${top}px`;
}
