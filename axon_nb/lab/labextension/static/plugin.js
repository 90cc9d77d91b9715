// @ts-check
// The plugin: it adds the panel, the item of the status bar and a command to JupyterLab or Notebook 7.

import { RankFilter } from "./filter.js";
import { Monitor } from "./monitor.js";
import { Panel } from "./panel.js";
import { isPaused, summarize } from "./words.js";

/** @import { Action } from "./panel.js" */
/** @import { Reply } from "./monitor.js" */

const SETTLED_MS = 150; // since the kernel became busy or idle, so that cells in a row cause one request
const ID = "axon-nb-panel";
const COMMAND = "axon-nb:toggle-panel";
const REPAIR = 'print(__import__("axon_nb").current_cluster().repair())';
const ICON = `<svg xmlns="http://www.w3.org/2000/svg" width="16" viewBox="0 0 16 16"><g class="jp-icon3" fill="#616161">
<circle cx="3.5" cy="3.5" r="2.5"/><circle cx="12.5" cy="3.5" r="2.5"/><circle cx="3.5" cy="12.5" r="2.5"/>
<circle cx="12.5" cy="12.5" r="2.5"/><path d="M3 3h10v10H3z M4 4v8h8V4z" fill-rule="evenodd"/></g></svg>`;
const NO_EXTENSION =
  "The Jupyter server does not have axon_nb's extension. Run `jupyter server extension enable axon_nb.lab.server`, and " +
  "restart the server.";

/** Asks Jupyter's server. */
class Server {
  /**
   * @param {any} connection `ServerConnection` of @jupyterlab/services
   * @param {any} settings of the server
   */
  constructor(connection, settings) {
    this.connection = connection;
    this.settings = settings;
  }

  ask = async (/** @type {string} */ method, /** @type {string} */ path) => {
    const url = new URL(`axon-nb/clusters${path}`, this.settings.baseUrl).href;
    try {
      const response = await this.connection.makeRequest(url, { method }, this.settings);
      if (response.ok) return /** @type {Reply} */ (await response.json());
      if (response.status === 404) return failure(NO_EXTENSION);
      return failure(`The Jupyter server refused it: ${response.status} ${response.statusText}.`);
    } catch {
      return failure("The Jupyter server does not reply.");
    }
  };
}

/** @returns {Reply} */
const failure = (/** @type {string} */ message) => ({ error: { code: "failed", message } });

/** Performs what the buttons say. */
class Actions {
  /**
   * @param {Monitor} monitor
   * @param {() => any} kernelInFront connection to the kernel of the notebook in front
   * @param {any} apputils @jupyterlab/apputils
   */
  constructor(monitor, kernelInFront, apputils) {
    this.monitor = monitor;
    this.kernelInFront = kernelInFront;
    this.apputils = apputils;
    /** @type {Panel | null} */
    this.panel = null;
  }

  act = async (/** @type {Action} */ action) => {
    const { panel } = this;
    const cluster = this.monitor.shown;
    if (!panel || !cluster || (action === "stop" && !(await this.#confirmStop(cluster.name)))) return;
    panel.setBusy(action, true);
    panel.showMessage(action === "repair" ? "Repairing …" : "");
    let reply = await this.monitor.ask("POST", `/${cluster.id}/${action}`);
    // Who sees this page may run cells in the notebook's kernel: there, `share` does not have to be on.
    if (reply.error?.code === "refused" && this.monitor.isOfFront(cluster))
      reply = await runInKernel(this.kernelInFront(), REPAIR);
    await this.monitor.refresh(); // what is said below is shown beside the state after it
    panel.setBusy(action, false);
    if (this.monitor.shown?.id === cluster.id) {
      if (reply.error) panel.showMessage(reply.error.message, true);
      else if (action === "stacks") panel.showStacks(reply.ok.text);
      else panel.showMessage(reply.ok.text);
    }
  };

  /** @param {string} name */
  async #confirmStop(name) {
    const { Dialog, showDialog } = this.apputils;
    const { button } = await showDialog({
      title: `Stop the ranks of ${name}?`,
      body: "The variables on all ranks are lost.",
      buttons: [Dialog.cancelButton(), Dialog.warnButton({ label: "Stop" })],
    });
    return button.accept;
  }
}

/**
 * Run code as a cell that is not in the notebook.
 *
 * @param {any} kernel
 * @param {string} code
 * @returns {Promise<Reply>} what it prints, or the message of its error
 */
async function runInKernel(kernel, code) {
  let text = "";
  const future = kernel.requestExecute({ code, store_history: false, allow_stdin: false });
  future.onIOPub = (/** @type {any} */ { header, content }) => {
    if (header.msg_type === "stream") text += content.text;
  };
  const { content } = await future.done;
  return content.status === "ok"
    ? { ok: { text: text.trim() } }
    : failure(content.evalue ?? "The kernel was interrupted.");
}

/**
 * The plugin of JupyterLab.
 *
 * @param {(name: string) => Promise<any>} shared loads a module of the application
 */
export async function makePlugin(shared) {
  const names = ["apputils", "notebook", "services", "statusbar", "ui-components"].map((name) => `@jupyterlab/${name}`);
  const [apputils, notebook, services, statusbar, components, widgets] = await Promise.all(
    [...names, "@lumino/widgets"].map(shared),
  );
  const optional = [apputils.ICommandPalette, statusbar?.IStatusBar].filter(Boolean);
  return {
    id: "@axon-nb/panel:plugin",
    description: "Shows what the ranks of the notebook in front are doing.",
    autoStart: true,
    requires: [notebook.INotebookTracker],
    optional,
    activate: (
      /** @type {any} */ app,
      /** @type {any} */ tracker,
      /** @type {any} */ palette,
      /** @type {any} */ bar,
    ) => activate({ app, tracker, palette, bar, apputils, services, components, widgets }),
  };
}

/** The item of the status bar: a button that shows and hides the panel. */
class StatusItem {
  node = document.createElement("div");
  #button = document.createElement("button");

  /**
   * @param {Monitor} monitor
   * @param {() => void} toggle
   */
  constructor(monitor, toggle) {
    this.monitor = monitor;
    this.#button.type = "button";
    this.#button.title = "Show or hide the ranks";
    this.#button.addEventListener("click", toggle);
    this.node.className = "axon-status-item";
    this.node.append(this.#button);
    this.draw();
  }

  /** Show the state in a few words; nothing without ranks. */
  draw() {
    const { shown, status, isInFront } = this.monitor;
    const text = this.monitor.starting || (shown && isInFront ? summarize(shown, status) : "");
    if (this.#button.textContent !== text) this.#button.textContent = text;
    this.#button.classList.toggle("axon-mod-busy", Boolean(status?.busy) && !(status && isPaused(status)));
    this.#button.classList.toggle("axon-mod-error", Boolean(shown) && (!status || Boolean(status.dead)));
    this.node.hidden = !text;
  }
}

function addStyle() {
  const link = document.createElement("link");
  link.rel = "stylesheet";
  link.href = new URL("panel.css", import.meta.url).href;
  document.head.append(link);
}

/** @param {Record<string, any>} parts */
function activate({ app, tracker, palette, bar, apputils, services, components, widgets }) {
  addStyle();
  const session = () => tracker.currentWidget?.sessionContext;
  const kernel = () => session()?.session?.kernel ?? null;
  const server = new Server(services.ServerConnection, app.serviceManager.serverSettings);
  const monitor = new Monitor(server.ask, () => kernel()?.id ?? null, draw);
  const actions = new Actions(monitor, kernel, apputils);
  const filter = new RankFilter(() => tracker.currentWidget?.node ?? null);
  const panel = new Panel(monitor, filter, actions.act);
  actions.panel = panel;

  const widget = new widgets.Widget({ node: panel.node });
  widget.id = ID;
  widget.title.caption = "Ranks";
  widget.title.label = "";
  widget.title.icon = new components.LabIcon({ name: "axon-nb:ranks", svgstr: ICON });
  widget.node.setAttribute("role", "region");
  widget.node.setAttribute("aria-label", "Ranks");
  app.shell.add(widget, "right", { rank: 900 });

  const toggle = () => (widget.isVisible ? app.shell.collapseRight() : app.shell.activateById(ID));
  app.commands.addCommand(COMMAND, {
    label: "Show Ranks",
    caption: "Show what the ranks of this notebook are doing",
    isToggled: () => widget.isVisible,
    execute: toggle,
  });
  palette?.addItem({ command: COMMAND, category: "axon_nb" });

  const item = new StatusItem(monitor, () => app.commands.execute(COMMAND));
  const itemWidget = new widgets.Widget({ node: item.node });
  itemWidget.id = `${ID}-status`;
  if (bar) bar.registerStatusItem(ID, { item: itemWidget, align: "left", rank: 50 });
  else app.shell.add(itemWidget, "menu", { rank: 900 }); // Notebook 7 has no status bar

  function draw() {
    panel.draw();
    item.draw();
    if (!monitor.isInFront) filter.rank = null;
    filter.apply();
  }
  follow(tracker, monitor, draw);
}

/**
 * Have the monitor ask whenever another notebook is in front, and when its kernel becomes busy or idle.
 *
 * @param {any} tracker
 * @param {Monitor} monitor
 * @param {() => void} draw
 */
function follow(tracker, monitor, draw) {
  const refresh = () => void monitor.refresh();
  let timer = 0;
  const refreshSoon = () => {
    clearTimeout(timer);
    timer = setTimeout(refresh, SETTLED_MS);
  };
  const onOutput = (/** @type {any} */ _, /** @type {any} */ { header, content }) => {
    const isEnd = header.msg_type === "status" && content.execution_state === "idle";
    const starting = isEnd ? "" : content.metadata?.axon_nb?.status;
    if (starting === undefined || starting === monitor.starting) return;
    monitor.starting = starting;
    draw();
  };
  let followed = /** @type {any} */ (null);
  const followCurrent = () => {
    followed?.kernelChanged.disconnect(refresh);
    followed?.statusChanged.disconnect(refreshSoon);
    followed?.iopubMessage.disconnect(onOutput);
    monitor.starting = "";
    followed = tracker.currentWidget?.sessionContext;
    followed?.kernelChanged.connect(refresh);
    followed?.statusChanged.connect(refreshSoon);
    followed?.iopubMessage.connect(onOutput);
    refresh();
  };
  tracker.currentChanged.connect(followCurrent);
  followCurrent(); // a restored notebook may be in front before the extension starts
}
