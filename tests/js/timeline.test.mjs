// The pure functions of axon_nb/widgets/static/timeline, run by node's own test runner.

import assert from "node:assert/strict";
import test from "node:test";

import { load } from "./load.mjs";

const tools = ["family", "measure", "search", "text", "trace"].map((name) => `tools/${name}`);
const names = ["store", "layout", "filter", "derived", "labels", "losses", "overview", "rows", ...tools];
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
const [CELL, FORWARD, BACKWARD, OPTIMIZER, COLLECTIVE, , WAIT, OTHER] = kinds.keys();

/** A message with spans {kind, rank, start, length, …}. */
function message(spans, { first = 0, ...header } = {}) {
  const labels = [];
  const columns = {
    start: [],
    duration: [],
    bytes: [],
    late: [],
    sequence: [],
    label: [],
    rank: [],
    line: [],
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
    sequence = 0,
    by = -1,
    line = 0,
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
      sequence,
      label: labels.findIndex((known) => known.join(" ") === label),
      rank,
      line,
      stage,
      microbatch,
      by,
    };
    for (const key of Object.keys(columns)) columns[key].push(values[key]);
  }
  const types = {
    start: Float64Array,
    sequence: Uint32Array,
    label: Uint16Array,
    rank: Uint16Array,
    line: Uint16Array,
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
const everything = (store, ranks = config.ranks) => timeline.shownLabels(store, ranks, config, "", new Set());

/** What the functions of the layout need besides a range. */
function selected(store, ranks = config.ranks) {
  const derived = new timeline.Derived({ ...config, ranks });
  derived.update(store);
  const ownCode = timeline.shownOwnCode(ranks, config, "", new Set());
  return { ranks, shown: everything(store, ranks), ownCode, hidesWaits: false, config, derived };
}

test("messages append, patches change what is there, what is old goes", () => {
  const store = stored([{ kind: FORWARD }, { kind: COLLECTIVE, start: 1 }], { restart: true });
  const patches = { number: Uint32Array.of(1), late: Float32Array.of(0.5), by: Int16Array.of(1) };
  assert.ok(timeline.merge(store, { ...message([{ kind: FORWARD, start: 2 }], { first: 2, patched: 1 }), patches }));
  assert.deepEqual([store.first, store.count, store.columns.late[1], store.columns.by[1]], [0, 3, 0.5, 1]);
  assert.ok(timeline.merge(store, message([], { first: 3, oldest: 2, dropped: 2, labels: [] })));
  assert.deepEqual([store.skip, store.dropped], [2, 2]);
  assert.equal(timeline.pixelShares(store, { ...selected(store, [0]), from: 0, to: 3, width: 30 }).found, 1);
});

test("a gap is noticed, and a full resend fixes it; duplicates are dropped", () => {
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
  const { pixels, found } = timeline.pixelShares(store, { ...selected(store), from: 0, to: 10, width: 100 });
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
  const { pixels } = timeline.pixelShares(store, { ...selected(store), from: 0, to: 10, width: 50 });
  assert.deepEqual(runs(pixels, 0), [{ left: 0, right: 50, kind: FORWARD }]);
  const at = 25 * paints.length + FORWARD;
  assert.ok(Math.abs(pixels.share[at] - 0.75) < 0.01);
  const alone = timeline.pixelShares(store, { ...selected(store, [1]), from: 4.9, to: 5.1, width: 500 });
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
  const known = selected(store);
  const hit = (rank, lane, time, near = 0) => timeline.spanAt(store, { ...known, rank, row: rank, lane, time, near });
  assert.deepEqual([hit(0, 0, 2), hit(0, 0, 5), hit(0, 1, 5), hit(1, 0, 5.5), hit(1, 0, 4)], [0, 1, 2, 3, -1]);
  assert.equal(hit(1, 0, 4.9, 0.2), 3);
  const next = (time, direction) => timeline.nextSpan(store, { ...known, rank: 0, row: 0, lane: 0, time, direction });
  assert.deepEqual([next(-1, 1), next(0, 1), next(4, 1), next(4, -1)], [0, 1, -1, 0]);
});

test("spans are described in words", () => {
  const store = stored(
    [
      { kind: COLLECTIVE, name: "all_reduce", group: "0", length: 0.0012, bytes: 4096, late: 0.0005, by: 2, start: 3 },
      { kind: WAIT, name: "RECV_F", stage: 1, microbatch: 3, length: 0.5, bytes: 10, group: "1" },
      { kind: BACKWARD, name: "backward", rank: 1, length: 2 },
      { kind: COLLECTIVE, name: "barrier", rank: 1, by: 1, length: 1 },
    ],
    { groups: { 0: "ranks 0-3" } },
  );
  const texts = [0, 1, 2, 3].map((i) => timeline.describe(store, i, config, 1));
  assert.equal(
    texts[0],
    "all_reduce · rank 0 · took 1.2 ms · waited for rank 2 500 µs · moved 4.00 KiB · rate 5.58 MiB/s · " +
      "group ranks 0-3 · at 2.0000 s",
  );
  const wait = "waits for message RECV_F · rank 0 · took 500 ms · stage 1 · microbatch 3 · moved 10 B · rate 20 B/s";
  assert.equal(texts[1], `${wait} · at -1.00 s`);
  assert.equal(texts[2], "backward · rank 1 · took 2.00 s · at -1.00 s");
  assert.match(texts[3], /barrier · rank 1 · took 1\.00 s · came last/);
});

test("a part of the own code is called by its name", () => {
  const store = stored([{ kind: OTHER, name: "garbage collection", length: 0.5 }]);
  assert.match(timeline.describe(store, 0, config), /^garbage collection · rank 0/);
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

const lineOf = (pixels, number) => runs(pixels, number).map(({ left, right, kind }) => [left, right, kind]);

test("a backward waits from its last collective on, and what is in no span is the rank's own code", () => {
  // Rank 0 waits for rank 1, which sleeps from 2 to 6 in its own code.
  const spans = [
    { kind: BACKWARD, rank: 0, start: 2, length: 7 },
    { kind: COLLECTIVE, rank: 0, start: 3, length: 5, late: 4, by: 1 },
    { kind: COLLECTIVE, rank: 0, start: 4, length: 5, late: 4, by: 1 },
    { kind: BACKWARD, rank: 1, start: 6, length: 3 },
    { kind: COLLECTIVE, rank: 1, start: 7, length: 1, by: 1 },
    { kind: COLLECTIVE, rank: 1, start: 8, length: 1, by: 1 },
    { kind: CELL, rank: 0, start: 0, length: 10 },
    { kind: CELL, rank: 1, start: 0, length: 10 },
  ];
  for (const order of [spans, [...spans].reverse()]) {
    const store = stored(order);
    const { pixels } = timeline.pixelShares(store, { ...selected(store), from: 0, to: 10, width: 100 });
    assert.deepEqual(lineOf(pixels, 0), [
      [0, 20, OTHER],
      [20, 40, BACKWARD],
      [40, 90, WAIT],
      [90, 100, OTHER],
    ]);
    assert.deepEqual(lineOf(pixels, 2), [
      [0, 60, OTHER],
      [60, 80, BACKWARD],
      [80, 90, WAIT],
      [90, 100, OTHER],
    ]);
  }
});

test("a running cell is own code as far as the rank is known", () => {
  const store = stored([{ kind: FORWARD, start: 4, length: 2 }], { focus: [0, null], now: 9 });
  const { pixels } = timeline.pixelShares(store, { ...selected(store), from: 0, to: 10, width: 100 });
  assert.deepEqual(lineOf(pixels, 0), [
    [0, 40, OTHER],
    [40, 60, FORWARD],
  ]);
});

test("hidden kinds are not drawn: own code, and waiting at the end of a backward", () => {
  const store = stored([
    { kind: BACKWARD, start: 2, length: 6 },
    { kind: COLLECTIVE, start: 4, length: 4 },
    { kind: CELL, start: 0, length: 10 },
  ]);
  const ownCode = timeline.shownOwnCode(config.ranks, config, "", new Set(["other"]));
  assert.deepEqual([...ownCode], [0, 0]);
  const options = { ...selected(store), ownCode, hidesWaits: true, from: 0, to: 10, width: 100 };
  assert.deepEqual(lineOf(timeline.pixelShares(store, options).pixels, 0), [[20, 80, BACKWARD]]);
  assert.deepEqual([...timeline.shownOwnCode(config.ranks, config, "other rank:1", new Set())], [0, 1]);
});

test("the own code below the pointer is found, with its length", () => {
  const store = stored([
    { kind: FORWARD, start: 2, length: 1 },
    { kind: FORWARD, start: 7, length: 1 },
    { kind: CELL, start: 0, length: 10 },
  ]);
  const at = (time) => timeline.ownCodeAt(store, { ...selected(store), rank: 0, row: 0, lane: 0, time, near: 0 });
  assert.deepEqual(at(5), { from: 3, to: 7 });
  assert.deepEqual(at(1), { from: 0, to: 2 });
  assert.equal(at(11), null);
});

test("no word is written over another one", () => {
  const kindOf = [FORWARD, BACKWARD, COLLECTIVE];
  let seed = 1;
  const random = () => {
    seed = (seed * 16807) % 2147483647;
    return seed / 2147483647;
  };
  for (let round = 0; round < 200; round++) {
    const boxes = Array.from({ length: 12 }, (_, index) => {
      const left = 500 * random();
      return { index, kind: kindOf[index % 3], left, right: left + 200 * random() };
    });
    const runs = boxes.map(({ kind, left, right }) => ({ kind, left, right })).sort((a, b) => a.left - b.left);
    const rooms = timeline.labelRooms(boxes, runs, 16).sort((a, b) => a.left - b.left);
    rooms.forEach(({ index, left, right }, i) => {
      assert.ok(right - left >= 16);
      assert.ok(left >= boxes[index].left && right <= boxes[index].right);
      if (i) assert.ok(left >= rooms[i - 1].right, "rooms overlap");
    });
  }
});

test("four collectives at once have one name, in its own room; words are shortened by meaning", () => {
  const boxes = [0, 1, 2, 3].map((index) => ({ index, kind: COLLECTIVE, left: 20 * index, right: 200 }));
  const rooms = timeline.labelRooms(boxes, [{ kind: COLLECTIVE, left: 0, right: 200 }], 16);
  for (let i = 1; i < rooms.length; i++) assert.ok(rooms[i].left >= rooms[i - 1].right);
  assert.deepEqual(timeline.wordsFor("backward", "backward", -1), ["backward", "bwd"]);
  assert.deepEqual(timeline.wordsFor("forward", "GPT", -1), ["GPT", "forward", "fwd"]);
  assert.deepEqual(timeline.wordsFor("forward", "F", 3), ["F 3", "3"]);
  assert.deepEqual(timeline.wordsFor("p2p", "recv", -1), ["recv"]);
});

test("the overview has the share of ranks that work and that wait", () => {
  const store = stored([
    { kind: FORWARD, rank: 0, start: 0, length: 10 },
    { kind: FORWARD, rank: 1, start: 0, length: 5 },
    { kind: WAIT, rank: 1, start: 5, length: 5 },
  ]);
  const { works, waits } = timeline.columnShares(store, { ...selected(store), from: 0, to: 10, width: 10 });
  assert.deepEqual(
    [...works].map((share) => Math.round(10 * share) / 10),
    [1, 1, 1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.5],
  );
  assert.deepEqual(
    [...waits].map((share) => Math.round(10 * share) / 10),
    [0, 0, 0, 0, 0, 0.5, 0.5, 0.5, 0.5, 0.5],
  );
});

test("steps end with the optimizer; several optimizers in a row end one", () => {
  const step = (start) => [
    { kind: FORWARD, start, length: 1 },
    { kind: BACKWARD, start: start + 1, length: 1 },
    { kind: OPTIMIZER, start: start + 2, length: 0.5 },
    { kind: OPTIMIZER, start: start + 2.5, length: 0.5 },
  ];
  const store = stored([...step(0), ...step(4)]);
  assert.deepEqual(selected(store).derived.steps, [3, 7]);
});

test("a collective's calls on all ranks belong together, and a microbatch's way through the stages of a step", () => {
  const call = (rank, sequence, start, group = "0") => ({
    kind: COLLECTIVE,
    name: "all_reduce",
    rank,
    sequence,
    start,
    group,
  });
  const store = stored([call(0, 7, 0), call(1, 7, 2), call(0, 8, 3), call(1, 8, 3), call(1, 7, 0, "1"), call(0, 0, 9)]);
  const family = (index) => [...timeline.familyOf(store, index, [])];
  assert.deepEqual(family(0), [0, 1]);
  assert.deepEqual(family(3), [2, 3]);
  assert.deepEqual(family(4), [], "of another group");
  assert.deepEqual(family(5), [], "its number is unknown");
  const action = (rank, microbatch, start) => ({
    kind: FORWARD,
    name: "F",
    rank,
    microbatch,
    start,
    stage: rank,
    group: "2",
  });
  const pipeline = stored([action(0, 0, 0), action(1, 0, 1), action(0, 1, 1), action(0, 0, 10), action(1, 0, 11)]);
  assert.deepEqual([...timeline.familyOf(pipeline, 1, [5, 15])], [0, 1]);
  assert.deepEqual([...timeline.familyOf(pipeline, 3, [5, 15])], [3, 4]);
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
