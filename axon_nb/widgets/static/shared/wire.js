// @ts-check
// What passes between a page and its kernel.

/**
 * What a page tells the kernel.
 *
 * @typedef {{op: "ready" | "resend" | "here" | "stop"}
 *   | {op: "seen", number: number}
 *   | {op: "what_if", setup: Record<string, string | boolean> | null}} Request
 */

/**
 * The kernel's side of a view, as anywidget hands it over.
 *
 * @typedef {object} Model
 * @property {(trait: string) => any} get
 * @property {(request: Request) => void} send
 * @property {(event: string, handler: (...values: any[]) => void) => void} on
 * @property {(event: string, handler: (...values: any[]) => void) => void} off
 */

/** @typedef {{model: Model, el: HTMLElement}} Context what anywidget gives a page's view */

/**
 * @template {ArrayLike<number>} Column
 * @typedef {{new (buffer: ArrayBuffer, offset: number, count: number): Column, BYTES_PER_ELEMENT: number}} ColumnType
 */

/**
 * A message of columns: its header, and a function that takes the next column.
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
  const take = (Type, count) => {
    const column = new Type(bytes, offset, count);
    offset += count * Type.BYTES_PER_ELEMENT;
    return column;
  };
  return { header, take };
}

const SILENT_S = 15; // after which the kernel must be gone, as it sends a message at least every 5

/**
 * What a store knows of time: `now` is the kernel's clock at the last message, in seconds.
 *
 * @typedef {{now: number, finished: boolean}} Clock
 */

/**
 * Keep a store up to date with what a kernel appends.
 *
 * @param {Model} model
 * @param {Clock} store
 * @param {object} handlers
 * @param {(message: DataView) => boolean} handlers.take whether the message fitted what came before
 * @param {() => void} [handlers.took] after each message that fitted
 * @param {() => void} handlers.changed after each message, and when the kernel is gone
 */
export function follow(model, store, { take, took, changed }) {
  let heard = performance.now();
  let closed = false;
  const silence = () => (performance.now() - heard) / 1000;
  const gone = () => !store.finished && (closed || silence() > SILENT_S);
  const now = () => (store.finished || gone() ? store.now : store.now + silence());
  /** @type {(message: {op: string}, buffers: DataView[]) => void} */
  const onMessage = (message, buffers) => {
    if (message.op !== "append") return;
    const fits = take(buffers[0]);
    heard = performance.now();
    if (fits) took?.();
    else model.send({ op: "resend" });
    changed();
  };
  const onClosed = () => {
    closed = true;
    changed();
  };
  const snapshot = model.get("snapshot");
  if (snapshot?.byteLength && !take(snapshot)) model.send({ op: "resend" });
  model.on("msg:custom", onMessage);
  model.on("comm_live_update", onClosed);
  model.send({ op: "ready" }); // the kernel waits for it after a reload: nobody hears what is sent before
  const close = () => {
    model.off("msg:custom", onMessage);
    model.off("comm_live_update", onClosed);
  };
  return { now, gone, close };
}

/**
 * A widget whose views share what `initialize` makes.
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
        const made = initialize(context);
        shared = made.shared;
        return made.close;
      },
      /** @param {Context} context */
      render: (context) => render(context, shared),
    };
  };
}

const HERE_MS = 4000;

/**
 * Tell the kernel every few seconds that a page shows this view. Returns a function that stops it.
 *
 * @param {Model} model
 * @param {Element} root
 * @param {() => boolean} wanted
 */
export function sayHere(model, root, wanted = () => true) {
  const here = () => {
    if (!document.hidden && root.isConnected && wanted()) model.send({ op: "here" });
  };
  const timer = setInterval(here, HERE_MS);
  document.addEventListener("visibilitychange", here);
  requestAnimationFrame(here); // only then is the root part of the page
  here();
  return () => {
    clearInterval(timer);
    document.removeEventListener("visibilitychange", here);
  };
}
