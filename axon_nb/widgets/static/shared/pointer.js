// @ts-check
// The pointer on a canvas: its position, the range that it marks, and its tooltip.

/** @import { Listen } from "./dom.js" */

/** @typedef {{x: number, y: number}} Position of the pointer on a canvas, in pixels of the page */

const MIN_MARK = 4; // pixels; fewer are a click

/**
 * Follow the pointer on a canvas. A brush shows the range that is being marked.
 *
 * @param {Listen} on
 * @param {HTMLCanvasElement} canvas
 * @param {HTMLElement} brush
 * @param {object} handlers
 * @param {(position: Position | null) => void} handlers.onMove null: it has left
 * @param {(left: number, right: number, hasShift: boolean) => void} handlers.onMark a range was marked, in
 *   pixels of the page, with the shift key or without
 * @param {(position: Position) => void} handlers.onClick
 * @param {() => number} handlers.height of the brush
 */
export function trackPointer(on, canvas, brush, { onMove, onMark, onClick, height }) {
  /** @type {Position | null} */
  let position = null;
  /** @type {number | null} */
  let pressedX = null;
  const markedRange = () => {
    if (pressedX === null || !position || Math.abs(position.x - pressedX) < MIN_MARK) return null;
    return { left: Math.min(pressedX, position.x), right: Math.max(pressedX, position.x) };
  };
  const showBrush = () => {
    const range = markedRange();
    brush.hidden = !range;
    if (!range) return;
    brush.style.left = `${canvas.offsetLeft + range.left}px`;
    brush.style.width = `${range.right - range.left}px`;
    brush.style.top = `${canvas.offsetTop}px`;
    brush.style.height = `${height()}px`;
  };
  /** @param {PointerEvent | null} event */
  const move = (event) => {
    position = event && { x: event.offsetX, y: event.offsetY };
    showBrush();
    onMove(position);
  };
  const cancel = () => {
    pressedX = null;
    showBrush();
  };
  on(canvas, "pointermove", move);
  on(canvas, "pointerleave", () => move(null));
  on(canvas, "pointerdown", (event) => {
    if (event.button !== 0) return;
    pressedX = event.offsetX;
    canvas.setPointerCapture(event.pointerId);
  });
  on(canvas, "pointerup", (event) => {
    position = { x: event.offsetX, y: event.offsetY };
    const range = markedRange();
    if (range) onMark(range.left, range.right, event.shiftKey);
    else if (pressedX !== null) onClick(position);
    cancel();
  });
  on(canvas, "pointercancel", cancel);
}

/**
 * Show a text or nodes near a place of the view, within it; nothing hides the tooltip.
 *
 * @param {HTMLElement} tip
 * @param {HTMLElement} root the view
 * @param {string | Node[]} content
 * @param {number} left
 * @param {number} top
 * @param {number} bottom where it ends if there is no room below `top`
 */
export function showTooltip(tip, root, content, left = 0, top = 0, bottom = top - 24) {
  tip.hidden = !content.length;
  if (!content.length) return;
  if (typeof content === "string") tip.textContent = content;
  else tip.replaceChildren(...content);
  const [width, height] = [tip.offsetWidth, tip.offsetHeight];
  const isWide = left + width > root.clientWidth;
  tip.style.left = `${Math.max(0, isWide ? Math.min(left - width - 24, root.clientWidth - width) : left)}px`;
  tip.style.top = `${top + height > root.clientHeight ? Math.max(0, bottom - height) : top}px`;
}
