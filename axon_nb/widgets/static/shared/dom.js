// @ts-check
// Elements, their text and their listeners.

const SVG = "http://www.w3.org/2000/svg";

/** @typedef {Record<string, string | number>} Attributes */

/**
 * An element with attributes and children.
 *
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Attributes} attributes
 * @param {(Node | string)[]} children
 * @returns {HTMLElementTagNameMap[Tag]}
 */
export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, String(value));
  node.append(...children);
  return node;
}

/**
 * An SVG element with attributes and children.
 *
 * @template {keyof SVGElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Attributes} attributes
 * @param {(Node | string)[]} children
 * @returns {SVGElementTagNameMap[Tag]}
 */
export function svgElement(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, String(value));
  node.append(...children);
  return node;
}

/**
 * An element with classes and properties.
 *
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {string} className
 * @param {Partial<HTMLElementTagNameMap[Tag]>} properties
 * @returns {HTMLElementTagNameMap[Tag]}
 */
export function create(tag, className, properties = {}) {
  return Object.assign(document.createElement(tag), { className, ...properties });
}

/**
 * Set an element's text only if it differs: new text is laid out, and read out, again.
 *
 * @param {Element} node
 * @param {string} text
 */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/**
 * @callback Listen
 * @param {EventTarget} target
 * @param {string} name
 * @param {(event: any) => void} handler
 * @param {AddEventListenerOptions} [options]
 * @returns {void}
 */

/**
 * A function that adds listeners until the signal is aborted.
 *
 * @param {AbortSignal} signal
 * @returns {Listen}
 */
export function listenUntil(signal) {
  return (target, name, handler, options) => target.addEventListener(name, handler, { ...options, signal });
}
