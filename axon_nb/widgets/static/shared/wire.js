// @ts-check
// The messages between a page and its kernel.

/**
 * A message of the page to the kernel.
 *
 * @typedef {{op: "ready" | "resend" | "heartbeat" | "stop"}
 *   | {op: "ack", number: number}
 *   | {op: "what_if", setup: Record<string, string | boolean> | null}} Request
 */

/**
 * The kernel's side of a view, as anywidget passes it.
 *
 * @typedef {object} Model
 * @property {(trait: string) => any} get
 * @property {(request: Request) => void} send
 * @property {(event: string, handler: (...values: any[]) => void) => void} on
 * @property {(event: string, handler: (...values: any[]) => void) => void} off
 */

/** @typedef {{model: Model, el: HTMLElement}} Context what anywidget passes to a page's view */

/**
 * @template {ArrayLike<number>} Column
 * @typedef {{new (buffer: ArrayBuffer, offset: number, count: number): Column, BYTES_PER_ELEMENT: number}} ColumnType
 */

/**
 * Unpack a message of columns: its header, and a function that returns the next column.
 *
 * @param {DataView} view
 */
export function unpack(view) {
  const bytes = /** @type {ArrayBuffer} */ (view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));
  const length = new DataView(bytes).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 8, length)));
  let offset = 8 + length;
  /**
   * @template {ArrayLike<number>} Column
   * @param {ColumnType<Column>} Type
   * @param {number} count
   */
  const nextColumn = (Type, count) => {
    const column = new Type(bytes, offset, count);
    offset += count * Type.BYTES_PER_ELEMENT;
    return column;
  };
  return { header, nextColumn };
}

const KERNEL_TIMEOUT_S = 15; // the kernel sends a message at least every 5 s

/**
 * The time that a store knows: `now` is the kernel's clock at the last message, in seconds.
 *
 * @typedef {{now: number, finished: boolean}} Clock
 */

/**
 * Keep a store up to date with the kernel's messages.
 *
 * @param {Model} model
 * @param {Clock} store
 * @param {object} handlers
 * @param {(message: DataView) => boolean} handlers.merge returns whether the message followed the earlier ones
 * @param {() => void} [handlers.onMerged] called after each message that did
 * @param {() => void} handlers.onChange called after each message, and when the kernel disconnects
 */
export function subscribe(model, store, { merge, onMerged, onChange }) {
  let receivedAt = performance.now();
  let isClosed = false;
  const silence = () => (performance.now() - receivedAt) / 1000;
  const isDisconnected = () => !store.finished && (isClosed || silence() > KERNEL_TIMEOUT_S);
  const now = () => (store.finished || isDisconnected() ? store.now : store.now + silence());
  /** @type {(message: {op: string}, buffers: DataView[]) => void} */
  const onMessage = (message, buffers) => {
    if (message.op !== "append") return;
    const isMerged = merge(buffers[0]);
    receivedAt = performance.now();
    if (isMerged) onMerged?.();
    else model.send({ op: "resend" });
    onChange();
  };
  const onClosed = () => {
    isClosed = true;
    onChange();
  };
  const snapshot = model.get("snapshot");
  if (snapshot?.byteLength && !merge(snapshot)) model.send({ op: "resend" });
  model.on("msg:custom", onMessage);
  model.on("comm_live_update", onClosed);
  model.send({ op: "ready" }); // after a reload the kernel waits for it: earlier messages would be lost
  const close = () => {
    model.off("msg:custom", onMessage);
    model.off("comm_live_update", onClosed);
  };
  return { now, isDisconnected, close };
}

/**
 * A widget whose views on all pages share what `initialize` makes.
 *
 * @template Shared
 * @param {(context: {model: Model}) => {shared: Shared, close: () => void}} initialize
 * @param {(context: Context, shared: Shared) => () => void} render
 */
export function widget(initialize, render) {
  return () => {
    /** @type {Shared} */
    let shared;
    return {
      /** @param {{model: Model}} context */
      initialize(context) {
        const initialized = initialize(context);
        shared = initialized.shared;
        return initialized.close;
      },
      /** @param {Context} context */
      render: (context) => render(context, shared),
    };
  };
}

/**
 * Load the script that a view needs only when it is used, from a trait.
 *
 * @param {string} text of the script
 * @returns {Promise<any>} the module
 */
export async function loadModule(text) {
  const address = URL.createObjectURL(new Blob([text], { type: "text/javascript" }));
  try {
    return await import(address);
  } finally {
    URL.revokeObjectURL(address);
  }
}

/**
 * Fold the pictures of views in the same output: a notebook saves them open. One that is drawn again stays as the
 * reader left the last one. Returns a function that stops it, and opens them.
 *
 * @param {Element} root of a live view
 */
function foldPictures(root) {
  const area = root.closest(".jp-OutputArea");
  if (!area) return () => {};
  /** @type {WeakSet<HTMLDetailsElement>} */
  const known = new WeakSet();
  let isOpen = false;
  const pictures = () => /** @type {NodeListOf<HTMLDetailsElement>} */ (area.querySelectorAll(".axon-picture"));
  const fold = () => {
    for (const picture of pictures()) {
      if (known.has(picture)) continue;
      known.add(picture);
      picture.open = isOpen;
      picture.addEventListener("toggle", () => {
        isOpen = picture.open;
      });
    }
  };
  const observer = new MutationObserver(fold);
  observer.observe(area, { childList: true, subtree: true });
  fold();
  return () => {
    observer.disconnect();
    for (const picture of pictures()) picture.open = true;
  };
}

const HEARTBEAT_MS = 4000;

/**
 * Report to the kernel every few seconds that a page shows this view, whose picture is folded meanwhile. Returns a
 * function that stops it.
 *
 * @param {Model} model
 * @param {Element} root
 * @param {() => boolean} isNeeded
 */
export function sendHeartbeats(model, root, isNeeded = () => true) {
  const sendIfVisible = () => {
    if (!document.hidden && root.isConnected && isNeeded()) model.send({ op: "heartbeat" });
  };
  const timer = setInterval(sendIfVisible, HEARTBEAT_MS);
  document.addEventListener("visibilitychange", sendIfVisible);
  let stopFolding = () => {};
  // The root is part of the page only then.
  const frame = requestAnimationFrame(() => {
    sendIfVisible();
    stopFolding = foldPictures(root);
  });
  sendIfVisible();
  return () => {
    cancelAnimationFrame(frame);
    stopFolding();
    clearInterval(timer);
    document.removeEventListener("visibilitychange", sendIfVisible);
  };
}
