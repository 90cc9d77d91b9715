// @ts-check
// What the page knows of the clusters: it asks Jupyter's server every two seconds, while somebody can see it,
// and on request.

/** @typedef {{id: string, name: string, state: string, num_ranks: number, kernel: string | null}} Cluster */

/**
 * What one rank is doing.
 *
 * @typedef {object} Rank
 * @property {number} rank
 * @property {string} state in words
 * @property {number} memory_bytes
 * @property {number} device_bytes
 * @property {number | null} cell
 */

/**
 * The reply to `axon-nb status --json`, and the verdict of `axon-nb explain`.
 *
 * @typedef {object} Status
 * @property {boolean} running
 * @property {string} busy ranks in a cell, such as "0-3"
 * @property {string} dead
 * @property {string} slowed what is slowed on purpose, such as "rank 2 × 2"
 * @property {boolean} share
 * @property {Rank[]} ranks
 * @property {string} verdict
 */

/** @typedef {{ok?: any, error?: {code: string, message: string}}} Reply */
/** @typedef {(method: string, path: string) => Promise<Reply>} Ask */

const PERIOD_MS = 2000;

/** Follows one cluster: that of the notebook in front, else one that was selected. */
export class Monitor {
  /** @type {Cluster[]} */
  clusters = [];
  /** @type {Cluster | null} */
  shown = null;
  /** @type {Status | null} */
  status = null;
  trouble = ""; // why there is no status, as a sentence
  isLoaded = false;
  starting = ""; // what the notebook in front says of ranks that it starts, such as "Starting 4 ranks … 3 of 4"

  #selected = "";
  #isAsking = false;
  #isStale = false;
  #timer = 0;
  #asked = Promise.resolve();

  /**
   * @param {Ask} ask
   * @param {() => string | null} kernelInFront id of the kernel of the notebook in front
   * @param {() => void} onChange
   */
  constructor(ask, kernelInFront, onChange) {
    this.ask = ask;
    this.kernelInFront = kernelInFront;
    this.onChange = onChange;
    document.addEventListener("visibilitychange", () => void this.refresh());
  }

  /** Whether the cluster that is shown belongs to the notebook in front. */
  get isInFront() {
    return this.shown !== null && this.isOfFront(this.shown);
  }

  /** Whether a cluster belongs to the notebook in front. */
  isOfFront(/** @type {Cluster} */ cluster) {
    return cluster.kernel !== null && cluster.kernel === this.kernelInFront();
  }

  /**
   * Follow a cluster while the notebook in front has none.
   *
   * @param {string} id
   */
  select(id) {
    this.#selected = id;
    return this.refresh();
  }

  /** Ask now, and then every two seconds; resolved when what was asked from now on has been answered. */
  refresh() {
    this.#isStale = true;
    if (!this.#isAsking) this.#asked = this.#ask();
    return this.#asked;
  }

  async #ask() {
    this.#isAsking = true;
    clearTimeout(this.#timer);
    try {
      while (this.#isStale && document.visibilityState === "visible") {
        this.#isStale = false;
        await this.#read();
        this.onChange();
      }
    } finally {
      this.#isAsking = false;
    }
    if (document.visibilityState === "visible") this.#timer = setTimeout(() => this.refresh(), PERIOD_MS);
  }

  async #read() {
    const list = await this.ask("GET", "");
    this.isLoaded = true;
    if (list.error) {
      Object.assign(this, { clusters: [], shown: null, status: null, trouble: list.error.message });
      return;
    }
    this.clusters = list.ok;
    const shown =
      this.clusters.find((cluster) => this.isOfFront(cluster)) ??
      this.clusters.find((cluster) => cluster.id === this.#selected) ??
      null;
    const reply = shown ? await this.ask("GET", `/${shown.id}/status`) : {};
    this.shown = shown;
    this.status = reply.ok ?? null;
    this.trouble = reply.error?.message ?? "";
  }
}
