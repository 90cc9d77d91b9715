// @ts-check
// The page's theme: colours for canvases, and whether patterns are wanted.

const EVEN_LUMINANCE = 0.19; // on which black and white are equally easy to read
const QUERIES = ["(prefers-contrast: more)", "(forced-colors: active)", "(prefers-color-scheme: dark)", "print"];

/**
 * The view's colours, by the names of their variables after `--axon-`; `patterns`: whether they are drawn as well.
 *
 * @typedef {{of: (name: string) => string, ink: string, font: string, patterns: boolean}} Theme
 */

/**
 * Read the colours of a view. They are valid until the appearance changes.
 *
 * @param {Element} root
 * @returns {Theme}
 */
export function readTheme(root) {
  const style = getComputedStyle(root);
  /** @type {Map<string, string>} */
  const known = new Map();
  const of = (/** @type {string} */ name) => {
    const found = known.get(name) ?? (style.getPropertyValue(`--axon-${name}`).trim() || style.color);
    known.set(name, found);
    return found;
  };
  return { of, ink: style.color, font: style.fontFamily, patterns: of("patterns") === "1" };
}

/**
 * Call a handler if the size, the theme or the user's preferences change. Returns a function that stops it.
 *
 * @param {Element} root
 * @param {() => void} handler
 */
export function onAppearanceChange(root, handler) {
  const size = new ResizeObserver(handler);
  size.observe(root);
  const theme = new MutationObserver(handler);
  theme.observe(document.body, { attributes: true });
  theme.observe(root, { attributes: true, attributeFilter: ["data-theme", "data-patterns"] });
  const queries = QUERIES.map((query) => matchMedia(query));
  for (const query of queries) query.addEventListener("change", handler);
  return () => {
    size.disconnect();
    theme.disconnect();
    for (const query of queries) query.removeEventListener("change", handler);
  };
}

/**
 * Black or white, whichever is easier to read on a colour.
 *
 * @param {string} color hex RGB
 */
export function inkOn(color) {
  const linear = [1, 3, 5].map((at) => {
    const channel = Number.parseInt(color.slice(at, at + 2), 16) / 255;
    return channel <= 0.04045 ? channel / 12.92 : ((channel + 0.055) / 1.055) ** 2.4;
  });
  const luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  return luminance > EVEN_LUMINANCE ? "#0B1020" : "#FFFFFF";
}

const PATTERNS_KEY = "axon_nb.patterns";

/**
 * Show patterns in a view if the user last chose so; `toggle` changes that, and returns whether they are shown.
 *
 * @param {HTMLElement} root
 */
export function patternSwitch(root) {
  const show = (/** @type {boolean} */ wanted) => {
    if (wanted) root.dataset.patterns = "on";
    else delete root.dataset.patterns;
    return wanted;
  };
  let wanted = false;
  try {
    wanted = show(localStorage.getItem(PATTERNS_KEY) === "on");
  } catch {} // a page without storage: a file, or a sandbox
  const toggle = () => {
    wanted = show(!wanted);
    try {
      localStorage.setItem(PATTERNS_KEY, wanted ? "on" : "off");
    } catch {}
    return wanted;
  };
  return { isOn: wanted, toggle };
}
