// The pure functions of axon_nb/widgets/static/timeline, run by node's own test runner.

import assert from "node:assert/strict";
import test from "node:test";

import { load } from "./load.mjs";

const names = ["store", "layout", "filter", "text"];
const timeline = Object.assign({}, ...(await Promise.all(names.map((name) => load(`timeline/${name}`)))));

const kinds = [
  ["cell", -1],
  ["forward", 0],
  ["backward", 0],
  ["optimizer", 0],
  ["collective", 1],
  ["p2p", 1],
  ["wait", 0],
  ["other", 0],
  ["bubble", 0],
];
const paints = kinds.map(([kind, lane]) => ({ kind, lane, label: kind === "p2p" ? "send, recv" : kind }));
const config = { ranks: [0, 1], paints };
const [, FORWARD, BACKWARD, OPTIMIZER, COLLECTIVE, , WAIT] = kinds.keys();

/** A message with spans {kind, rank, start, length, …}. */
function message(spans, { first = 0, ...header } = {}) {
  const labels = [];
  const columns = {
    start: [],
    duration: [],
    bytes: [],
    late: [],
    label: [],
    rank: [],
    stage: [],
    microbatch: [],
    by: [],
  };
  for (const {
    kind,
    name = kinds[kind][0],
    group = "",
    rank = 0,
    start = 0,
    length = 1,
    bytes = 0,
    late = 0,
    by = -1,
    stage = -1,
    microbatch = -1,
  } of spans) {
    const label = `${kind} ${name} ${group}`;
    if (!labels.some((known) => known.join(" ") === label)) labels.push([kind, name, group]);
    const values = {
      start,
      duration: length,
      bytes,
      late,
      label: labels.findIndex((known) => known.join(" ") === label),
      rank,
      stage,
      microbatch,
      by,
    };
    for (const key of Object.keys(columns)) columns[key].push(values[key]);
  }
  const types = {
    start: Float64Array,
    label: Uint16Array,
    rank: Uint16Array,
    stage: Int16Array,
    microbatch: Int16Array,
    by: Int16Array,
  };
  for (const key of Object.keys(columns)) columns[key] = (types[key] ?? Float32Array).from(columns[key]);
  const rest = {
    labels,
    labelsFrom: 0,
    groups: {},
    oldest: 0,
    dropped: 0,
    lost: 0,
    now: 0,
    focus: [null, null],
    finished: false,
  };
  const none = { number: new Uint32Array(0), late: new Float32Array(0), by: new Int16Array(0) };
  return {
    header: { ...rest, first, count: spans.length, patched: 0, ...header },
    columns,
    patches: header.patches ?? none,
  };
}

function stored(spans, header) {
  const store = timeline.newStore(2);
  assert.ok(timeline.merge(store, message(spans, header)));
  return store;
}

const runs = (pixels, line) => pixels.runs(line, timeline.MIN_SHARE);
const everything = (store) => timeline.shownLabels(store, config.ranks, config, "", new Set());

test("messages append, patches change what is there, what is old goes", () => {
  const store = stored([{ kind: FORWARD }, { kind: COLLECTIVE, start: 1 }], { restart: true });
  const patches = { number: Uint32Array.of(1), late: Float32Array.of(0.5), by: Int16Array.of(1) };
  assert.ok(timeline.merge(store, { ...message([{ kind: FORWARD, start: 2 }], { first: 2, patched: 1 }), patches }));
  assert.deepEqual([store.first, store.count, store.columns.late[1], store.columns.by[1]], [0, 3, 0.5, 1]);
  assert.ok(timeline.merge(store, message([], { first: 3, oldest: 2, dropped: 2, labels: [] })));
  assert.deepEqual([store.skip, store.dropped], [2, 2]);
  assert.equal(
    timeline.pixelShares(store, { ranks: [0], from: 0, to: 3, width: 30, shown: everything(store), config }).found,
    1,
  );
});

test("a gap is noticed, and all sent again mends it; what comes twice is taken once", () => {
  const store = stored([{ kind: FORWARD }], { restart: true });
  assert.equal(timeline.merge(store, message([{ kind: FORWARD }], { first: 5 })), false);
  assert.ok(timeline.merge(store, message([{ kind: FORWARD }, { kind: BACKWARD }], { restart: true })));
  assert.ok(
    timeline.merge(
      store,
      message(
        [
          { kind: BACKWARD, start: 7 },
          { kind: BACKWARD, start: 8 },
        ],
        { first: 1, labels: [] },
      ),
    ),
  );
  assert.deepEqual([...store.columns.start.subarray(0, store.count)], [0, 0, 8]);
  assert.ok(
    timeline.merge(store, message([{ kind: FORWARD }], { first: 90, oldest: 90, labels: [] })),
    "all before were dropped",
  );
  assert.deepEqual([store.first, store.count], [90, 1]);
});

test("a page that is loaded later begins with what is newest and says what it lacks", () => {
  const store = stored([{ kind: FORWARD }], { first: 40, oldest: 10 });
  assert.deepEqual([store.first, store.count, store.missing], [40, 1, 30]);
});

test("a hundred thousand spans stay in bounds", () => {
  const store = timeline.newStore();
  const batch = Array.from({ length: 2000 }, (_, i) => ({ kind: FORWARD, start: i, length: 0.5 }));
  for (let first = 0; first < 300_000; first += 2000) {
    const labels = first ? { labels: [] } : {};
    assert.ok(timeline.merge(store, message(batch, { first, oldest: Math.max(0, first + 2000 - 100_000), ...labels })));
  }
  assert.equal(store.count - store.skip, 100_000);
  assert.ok(store.columns.start.length <= 262_144, `${store.columns.start.length}`);
});

test("pixels show what takes most of them; what waits does not compute; late collectives begin with waiting", () => {
  const store = stored([
    { kind: FORWARD, start: 0, length: 10 },
    { kind: WAIT, start: 4, length: 2 },
    { kind: COLLECTIVE, start: 0, length: 6, late: 4, by: 1 },
    { kind: FORWARD, start: 0, length: 5, rank: 7 },
  ]);
  const { pixels, found } = timeline.pixelShares(store, {
    ranks: [0, 1],
    from: 0,
    to: 10,
    width: 100,
    shown: everything(store),
    config,
  });
  assert.equal(found, 3, "rank 7 has no row");
  const line = (number) => runs(pixels, number).map(({ left, right, kind }) => [left, right, kind]);
  assert.deepEqual(line(0), [
    [0, 40, FORWARD],
    [40, 60, WAIT],
    [60, 100, FORWARD],
  ]);
  assert.deepEqual(line(1), [
    [0, 40, WAIT],
    [40, 60, COLLECTIVE],
  ]);
  assert.deepEqual(line(2), []);
});

test("many short spans fill their pixels in proportion, and a single short one is still there", () => {
  const short = Array.from({ length: 1000 }, (_, i) => ({
    kind: i % 4 ? FORWARD : BACKWARD,
    start: i / 100,
    length: 0.01,
  }));
  const store = stored([...short, { kind: OPTIMIZER, rank: 1, start: 5, length: 1e-4 }]);
  const { pixels } = timeline.pixelShares(store, {
    ranks: [0, 1],
    from: 0,
    to: 10,
    width: 50,
    shown: everything(store),
    config,
  });
  assert.deepEqual(runs(pixels, 0), [{ left: 0, right: 50, kind: FORWARD }]);
  const at = 25 * paints.length + FORWARD;
  assert.ok(Math.abs(pixels.share[at] - 0.75) < 0.01);
  const alone = timeline.pixelShares(store, {
    ranks: [1],
    from: 4.9,
    to: 5.1,
    width: 500,
    shown: timeline.shownLabels(store, [1], config, "", new Set()),
    config,
  });
  assert.equal(runs(alone.pixels, 0).length, 1);
});

test("the filter wants each of its words, and kinds can be switched off", () => {
  const store = stored([
    { kind: COLLECTIVE, name: "all_reduce", group: "3" },
    { kind: COLLECTIVE, name: "all_gather" },
    { kind: FORWARD, name: "GPT" },
  ]);
  const found = (filter, ...off) => [...timeline.shownLabels(store, config.ranks, config, filter, new Set(off))];
  assert.deepEqual(found(""), [1, 1, 1, 1, 1, 1]);
  assert.deepEqual(found("ALL_"), [1, 1, 1, 1, 0, 0]);
  assert.deepEqual(found("all_reduce rank:1"), [0, 1, 0, 0, 0, 0]);
  assert.deepEqual(found("group:3"), [1, 1, 0, 0, 0, 0]);
  assert.deepEqual(found("", "collective"), [0, 0, 0, 0, 1, 1]);
});

test("the pointer finds the shortest span under it, in its lane and row", () => {
  const store = stored([
    { kind: FORWARD, start: 0, length: 10 },
    { kind: WAIT, start: 4, length: 2 },
    { kind: COLLECTIVE, start: 4, length: 2 },
    { kind: FORWARD, start: 5, length: 1, rank: 1 },
  ]);
  const known = { ranks: config.ranks, shown: everything(store), config };
  const hit = (rank, lane, time, near = 0) => timeline.spanAt(store, { ...known, rank, row: rank, lane, time, near });
  assert.deepEqual([hit(0, 0, 2), hit(0, 0, 5), hit(0, 1, 5), hit(1, 0, 5.5), hit(1, 0, 4)], [0, 1, 2, 3, -1]);
  assert.equal(hit(1, 0, 4.9, 0.2), 3);
  const next = (time, direction) => timeline.nextSpan(store, { ...known, rank: 0, row: 0, lane: 0, time, direction });
  assert.deepEqual([next(-1, 1), next(0, 1), next(4, 1), next(4, -1)], [0, 1, -1, 0]);
});

test("spans are told in words", () => {
  const store = stored(
    [
      { kind: COLLECTIVE, name: "all_reduce", group: "0", length: 0.0012, bytes: 4096, late: 0.0005, by: 2, start: 3 },
      { kind: WAIT, name: "RECV_F", stage: 1, microbatch: 3, length: 0.5, bytes: 10, group: "1" },
      { kind: BACKWARD, name: "backward", rank: 1, length: 2 },
      { kind: COLLECTIVE, name: "barrier", rank: 1, by: 1, length: 1 },
    ],
    { groups: { 0: "ranks 0-3" } },
  );
  const told = [0, 1, 2, 3].map((i) => timeline.describe(store, i, config, 1));
  assert.equal(
    told[0],
    "rank 0 · all_reduce · 1.2 ms · 4.00 KiB · group 0 (ranks 0-3) · waited 500 µs for rank 2 · at 2.0000 s",
  );
  assert.equal(told[1], "rank 0 · waits for message RECV_F · 0.50 s · stage 1, microbatch 3 · 10 B · at -1.00 s");
  assert.equal(told[2], "rank 1 · backward · 2.00 s · at -1.00 s");
  assert.match(told[3], /barrier · 1\.00 s · came last/);
});

test("the view keeps to the last cell, zooms, moves, and shows everything", () => {
  const store = stored(
    [
      { kind: FORWARD, start: -50, length: 1 },
      { kind: FORWARD, start: 10, length: 5 },
    ],
    { focus: [10, 15] },
  );
  const cell = timeline.visibleRange(null, store, 99);
  assert.ok(cell.from === 10 && cell.to >= 15 && cell.to < 15.1);
  assert.deepEqual(timeline.visibleRange("all", store, 99), { from: -50, to: 15 });
  const zoomed = timeline.navigate(null, "+", store, 99).zoom;
  assert.ok(Math.abs(zoomed.to - zoomed.from - (cell.to - cell.from) / 2) < 1e-9 && zoomed.from > 10);
  const moved = timeline.navigate(zoomed, "ArrowRight", store, 99).zoom;
  assert.ok(moved.from > zoomed.from);
  assert.equal(timeline.navigate(moved, "Home", store, 99).zoom, null);
  assert.equal(timeline.navigate(moved, "a", store, 99).zoom, "all");
  assert.equal(timeline.navigate({ from: -40, to: 15 }, "-", store, 99).zoom, "all");
  assert.equal(timeline.navigate(null, "x", store, 99), null);
});

test("while a cell runs the view follows the present", () => {
  const store = stored([{ kind: FORWARD, start: 10, length: 5 }], { focus: [10, null], now: 20 });
  assert.deepEqual(timeline.visibleRange(null, store, 21), { from: 10, to: 21 });
  const near = timeline.navigate(null, "+", store, 21).zoom;
  assert.deepEqual(timeline.visibleRange(near, store, 22), { from: 22 - 5.5, to: 22 });
});

test("the trace is one that Perfetto opens", () => {
  const store = stored([
    { kind: COLLECTIVE, name: "all_reduce", group: "0", rank: 1, start: 2, length: 0.5, bytes: 8 },
    { kind: FORWARD, start: 1 },
  ]);
  const trace = timeline.chromeTrace(store, config);
  const { args, ...event } = trace.traceEvents.find(({ name }) => name === "all_reduce");
  assert.deepEqual(event, {
    name: "all_reduce",
    cat: "collective",
    ph: "X",
    ts: 1e6,
    dur: 5e5,
    pid: 1,
    tid: "collective",
  });
  assert.deepEqual(args, { group: "0", bytes: 8 });
  assert.equal(trace.traceEvents.filter(({ ph }) => ph === "M").length, 2);
  JSON.parse(JSON.stringify(trace));
});
