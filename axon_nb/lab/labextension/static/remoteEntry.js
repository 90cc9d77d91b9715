// @ts-check
// What JupyterLab loads: the interface of a webpack container, by hand, so that the files of this folder need no build.
// Interface: https://webpack.js.org/concepts/module-federation/#dynamic-remote-containers

(() => {
  const { src } = /** @type {HTMLScriptElement} */ (document.currentScript);
  /** @type {Record<string, Record<string, {get: () => Promise<() => any>, loaded?: number}>>} */
  let scope = {};

  /**
   * A module that the application shares with its extensions; null if it has none of this name.
   *
   * @param {string} name
   * @returns {Promise<any>}
   */
  async function shared(name) {
    const versions = Object.values(scope[name] ?? {});
    const entry = versions.find((version) => version.loaded) ?? versions.at(-1);
    return entry ? (await entry.get())() : null;
  }

  const container = {
    init(/** @type {typeof scope} */ modules) {
      scope = modules;
    },
    async get() {
      const { makePlugin } = await import(new URL("plugin.js", src).href);
      const plugin = await makePlugin(shared);
      return () => ({ __esModule: true, default: plugin });
    },
  };
  const page = /** @type {{_JUPYTERLAB?: Record<string, unknown>}} */ (window);
  page._JUPYTERLAB = { ...page._JUPYTERLAB, "@axon-nb/panel": container };
})();
