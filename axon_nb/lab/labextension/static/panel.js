// @ts-check
// The side panel's elements, and what they show.

import {
  countRanks,
  describeUse,
  expandRanks,
  formatBytes,
  nameRanks,
  shortState,
  summarize,
  unbroken,
} from "./words.js";

/** @import { RankFilter } from "./filter.js" */
/** @import { Cluster, Monitor, Rank, Status } from "./monitor.js" */

/** @typedef {"interrupt" | "stacks" | "repair" | "stop"} Action */

const MESSAGE_MS = 20_000; // how long a message stays that is not an error

/** @type {[Action, string, string][]} */
const ACTIONS = [
  ["interrupt", "Interrupt", "Interrupt the cell on all ranks"],
  ["stacks", "Stacks", "Show where each rank is"],
  ["repair", "Repair", "Replace dead ranks"],
  ["stop", "Stop", "Stop all ranks"],
];

/**
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Record<string, string>} attributes
 * @param {(Node | string)[]} children
 */
function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** Change a text only if it differs: a screen reader reads it, and a selection is lost. */
function setText(/** @type {Element} */ node, /** @type {string} */ text) {
  if (node.textContent !== text) node.textContent = text;
}

/** The panel's content. */
export class Panel {
  node = element("div", { class: "axon-panel" });
  #name = element("h2");
  #summary = element("p", { class: "axon-panel-summary" });
  #verdict = element("p", { class: "axon-panel-verdict" });
  #message = element("p", { class: "axon-panel-message", role: "status" });
  #rows = element("tbody");
  #device = element("th", { scope: "col" }, "device");
  #stacksTitle = element("span");
  #stacks = element("pre", { tabindex: "0", "aria-label": "Stacks" });
  #others = element("ul");
  /** @type {Map<Action, HTMLButtonElement>} */
  #buttons = new Map();
  #listed = "";
  /** @type {string | undefined} */
  #drawn = undefined; // id of the cluster
  #timer = 0;
  #wasBusy = false;

  /**
   * @param {Monitor} monitor
   * @param {RankFilter} filter of the outputs
   * @param {(action: Action) => Promise<void>} act
   */
  constructor(monitor, filter, act) {
    this.monitor = monitor;
    this.filter = filter;
    const tools = element("div", { role: "group", class: "axon-panel-tools", "aria-label": "Actions on all ranks" });
    for (const [action, label, title] of ACTIONS) {
      const button = element("button", { type: "button", "data-action": action, title }, label);
      button.addEventListener("click", () => {
        if (button.getAttribute("aria-disabled") !== "true") void act(action);
      });
      this.#buttons.set(action, button);
      tools.append(button);
    }
    const head = element(
      "tr",
      {},
      ...["rank", "state", "memory"].map((title) => element("th", { scope: "col" }, title)),
    );
    head.append(this.#device);
    const table = element("table", {}, element("thead", {}, head), this.#rows);
    const close = element("button", { type: "button", title: "Hide the stacks" }, "Hide");
    close.addEventListener("click", () => this.showStacks(""));
    this.stacks = element("section", {}, element("h3", {}, this.#stacksTitle, close), this.#stacks);
    this.cluster = element("section", {}, this.#name, this.#summary, this.#verdict, tools, this.#message, table);
    this.others = element("section", { class: "axon-panel-others" }, element("h3", {}, "Other clusters"), this.#others);
    this.why = element("span");
    this.start = element(
      "span",
      {},
      "To start four, run ",
      element("code", {}, "%distributed start -n 4"),
      " in a cell.",
    );
    this.hint = element("p", { class: "axon-panel-hint" }, this.why, this.start);
    this.node.append(this.hint, this.cluster, this.stacks, this.others);
    this.showStacks("");
    this.draw();
  }

  /** Show what the last action has done. */
  showMessage(/** @type {string} */ text, isError = false) {
    setText(this.#message, unbroken(text));
    this.#message.classList.toggle("axon-mod-error", isError);
    this.#message.hidden = !text;
    clearTimeout(this.#timer);
    if (text && !isError) this.#timer = setTimeout(() => this.showMessage(""), MESSAGE_MS);
  }

  /** Show stacks as text; hide them if it is empty. */
  showStacks(/** @type {string} */ text) {
    setText(this.#stacks, text);
    setText(this.#stacksTitle, `Stacks at ${new Date().toLocaleTimeString()}`);
    this.stacks.hidden = !text;
  }

  /** Show which action is in progress. */
  setBusy(/** @type {Action} */ action, /** @type {boolean} */ isBusy) {
    this.#buttons.get(action)?.toggleAttribute("data-busy", isBusy);
    this.draw();
  }

  /** Show what the monitor knows. */
  draw() {
    const { shown, status, trouble, isLoaded, starting } = this.monitor;
    this.cluster.hidden = !shown;
    this.hint.hidden = Boolean(shown);
    if (shown?.id !== this.#drawn) {
      this.#drawn = shown?.id;
      this.showStacks("");
      this.showMessage("");
    }
    if (shown) this.#drawCluster(shown, status, trouble);
    else {
      const why = this.monitor.kernelInFront()
        ? "This notebook has no ranks."
        : "No notebook with a kernel is in front.";
      this.start.hidden = Boolean(trouble || starting) || !isLoaded;
      setText(this.why, starting || (isLoaded ? trouble || `${why} ` : ""));
    }
    this.#drawOthers();
  }

  #drawCluster(/** @type {Cluster} */ cluster, /** @type {Status | null} */ status, /** @type {string} */ trouble) {
    setText(this.#name, cluster.name);
    this.#name.title = this.monitor.isInFront
      ? "The ranks of this notebook"
      : "The ranks of another notebook or program";
    setText(this.#summary, `${summarize(cluster, status)}${this.monitor.isInFront ? "" : " (not this notebook)"}`);
    setText(this.#verdict, unbroken(trouble || (status?.verdict ?? "")));
    this.#verdict.hidden = !this.#verdict.textContent;
    const dead = status?.dead ?? "";
    const isBusy = Boolean(status?.busy);
    if (isBusy && !this.#wasBusy) this.showMessage(""); // it is about an earlier cell
    this.#wasBusy = isBusy;
    const why = cluster.state === "detached" ? "No notebook uses these ranks" : "The notebook does not reply";
    const silent = status ? "" : why;
    this.#enable("interrupt", silent || (status?.busy ? "" : "No cell is running"));
    this.#enable("stacks", silent);
    const busy = status?.busy ? "Interrupt the cell first" : "";
    this.#enable("repair", silent || (dead ? busy : "No rank is dead"), `Replace ${nameRanks(dead)}`);
    this.#enable("stop", "");
    this.#drawRanks(status?.ranks ?? []);
  }

  /**
   * @param {Action} action
   * @param {string} reason why it is not possible; empty: it is
   * @param {string} title what it does, if that differs
   */
  #enable(action, reason, title = "") {
    const button = this.#buttons.get(action);
    if (!button) return;
    const usual = ACTIONS.find(([name]) => name === action)?.[2] ?? "";
    const isBusy = button.hasAttribute("data-busy");
    button.title = reason || title || usual;
    button.setAttribute("aria-disabled", String(Boolean(reason) || isBusy));
  }

  #drawRanks(/** @type {Rank[]} */ ranks) {
    const hasDevice = ranks.some((rank) => rank.device_bytes > 0);
    this.#device.hidden = !hasDevice;
    while (this.#rows.rows.length > ranks.length) this.#rows.deleteRow(-1);
    const dead = new Set(expandRanks(this.monitor.status?.dead ?? ""));
    for (const [i, rank] of ranks.entries()) {
      const row = this.#rows.rows[i] ?? this.#addRow();
      const [, state, memory, device] = row.cells;
      const button = /** @type {HTMLButtonElement} */ (row.querySelector("button"));
      row.classList.toggle("axon-mod-error", dead.has(rank.rank));
      setText(button, String(rank.rank));
      button.disabled = !this.monitor.isInFront;
      button.setAttribute("aria-pressed", String(this.filter.rank === rank.rank));
      button.title = `Dim what other ranks printed than rank ${rank.rank}`;
      setText(state, dead.has(rank.rank) ? `dead: ${rank.state}` : shortState(rank.state));
      state.title = rank.state;
      setText(memory, formatBytes(rank.memory_bytes));
      setText(device, formatBytes(rank.device_bytes));
      device.hidden = !hasDevice;
    }
  }

  #addRow() {
    const row = this.#rows.insertRow();
    const button = element("button", { type: "button" });
    button.addEventListener("click", () => {
      this.filter.toggle(Number(button.textContent));
      this.draw();
    });
    row.append(element("th", { scope: "row" }, button), element("td"), element("td"), element("td"));
    return row;
  }

  /** List the other clusters, unless the notebook in front has one. */
  #drawOthers() {
    const { clusters, shown, isInFront } = this.monitor;
    const others = isInFront ? [] : clusters.filter((cluster) => cluster.id !== shown?.id);
    this.others.hidden = others.length === 0;
    const listed = JSON.stringify(others);
    if (listed === this.#listed) return; // the focus may be on one of them
    this.#listed = listed;
    this.#others.replaceChildren(
      ...others.map((cluster) => {
        const text = `${cluster.name}: ${countRanks(cluster.num_ranks)}, ${describeUse(cluster)}`;
        const show = element("button", { type: "button", "aria-label": `Show ${cluster.name}` }, "Show");
        show.addEventListener("click", () => void this.monitor.select(cluster.id));
        return element("li", {}, text, show);
      }),
    );
  }
}
