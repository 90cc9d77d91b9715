// The pure functions of axon_nb/widgets/static/strip, run by node's own test runner.

import assert from "node:assert/strict";
import test from "node:test";

import { load } from "./load.mjs";

const strip = { ...(await load("shared/format")), ...(await load("strip/store")), ...(await load("strip/layout")) };

const names = ["idle", "running", "collective", "waiting", "done", "failed", "dead", "stopped"];
const [, RUNNING, COLLECTIVE, WAITING, DONE, FAILED, DEAD, STOPPED] = names.keys();
const config = {
  ranks: [0, 2],
  silence: 2,
  paints: names.map((name) => ({ name, terminal: ["done", "failed", "dead", "stopped"].includes(name) })),
};

function segment(activity, start, end, more = {}) {
  return { activity, start, end, since: start, line: 0, low: 0, high: 0, call: "", mixed: false, ...more };
}

function message(rows, { generations = rows.map(() => 0), replaced = [], ...header } = {}) {
  const columns = { start: [], end: [], since: [], position: [], line: [], low: [], high: [], row: [], call: [] };
  Object.assign(columns, { activity: [], mixed: [] });
  const calls = [];
  for (const [row, entries] of rows.entries()) {
    for (const [position, entry] of Object.entries(entries)) {
      if (!calls.includes(entry.call)) calls.push(entry.call);
      const own = { mixed: Number(entry.mixed), call: calls.indexOf(entry.call), position: Number(position), row };
      for (const name of Object.keys(columns)) columns[name].push({ ...entry, ...own }[name]);
    }
  }
  const rest = { now: 0, lost: 0, coarse: 0, finished: false, ...header };
  return { header: { count: columns.row.length, calls, generations, replaced, ...rest }, columns };
}

test("a message extends the last segment and adds new ones", () => {
  const store = strip.newStore(2);
  assert.ok(strip.merge(store, message([[segment(RUNNING, 0, 1)], []])));
  const next = { 0: segment(RUNNING, 0, 2), 1: segment(COLLECTIVE, 2, 3, { call: "barrier" }) };
  assert.ok(strip.merge(store, message([next, {}], { now: 3, lost: 4 })));
  assert.deepEqual(store.rows[0].segments, [segment(RUNNING, 0, 2), segment(COLLECTIVE, 2, 3, { call: "barrier" })]);
  assert.deepEqual([store.now, store.lost, store.finished], [3, 4, false]);
});

test("a missing message is noticed, and a full resend fixes it", () => {
  const store = strip.newStore(1);
  assert.equal(strip.merge(store, message([{ 3: segment(RUNNING, 3, 4) }])), false);
  assert.deepEqual(store.rows[0].segments, []);
  assert.equal(strip.merge(store, message([{ 0: segment(RUNNING, 0, 1) }], { generations: [1] })), false);
  const whole = message([[segment(RUNNING, 0, 3), segment(DONE, 3, 4)]], { generations: [1], replaced: [0] });
  assert.ok(strip.merge(store, whole));
  assert.equal(store.rows[0].segments.length, 2);
  assert.ok(strip.merge(store, message([[segment(RUNNING, 0, 1)]], { generations: [1], replaced: [0] })));
  assert.equal(store.rows[0].segments.length, 1);
});

test("durations read like those of the kernel", () => {
  const said = [0, 0.254, 0.999, 2.14, 99.94, 99.96, 192, 3599, 3600, 7500].map(strip.formatSeconds);
  const expected = ["0.00 s", "0.25 s", "1.0 s", "2.1 s", "99.9 s", "1 min 40 s", "3 min 12 s", "59 min 59 s"];
  assert.deepEqual(said, [...expected, "1 h 00 min", "2 h 05 min"]);
});

test("the present state is words", () => {
  const say = (...last) => strip.describe([segment(...last)], 10, config);
  assert.equal(strip.describe([], 10, config), "no sample yet");
  assert.equal(say(RUNNING, 0, 9.9, { line: 7 }), "running, line 7");
  assert.equal(say(RUNNING, 0, 6, { line: 7 }), "running, line 7, no sample for 4.0 s");
  assert.equal(say(COLLECTIVE, 9.8, 9.9, { call: "all_reduce", line: 4 }), "in all_reduce, line 4");
  const wait = { call: "all_reduce", line: 4, since: 7.9 };
  assert.equal(say(WAITING, 8.2, 9.9, wait), "waiting in all_reduce, line 4, 2.1 s");
  assert.equal(say(DONE, 4, 5), "done after 4.0 s");
  assert.equal(say(FAILED, 4, 5), "failed after 4.0 s");
  assert.equal(say(DEAD, 4, 5), "died after 4.0 s");
  assert.equal(say(STOPPED, 4, 5, { call: "recv", line: 4 }), "stopped in recv, line 4");
});

test("the tooltip tells lines, times and what was merged", () => {
  const running = segment(RUNNING, 1, 2, { low: 2, high: 5 });
  assert.equal(strip.describeSegment(3, running, 2.5, config), "rank 3 · running, lines 2–5 · 1.00–2.50 s (1.5 s)");
  const waiting = segment(WAITING, 1, 2, { call: "recv", low: 4, high: 4, mixed: true });
  assert.equal(
    strip.describeSegment(0, waiting, 2, config),
    "rank 0 · mostly waiting in recv, line 4 · 1.00–2.00 s (1.0 s)",
  );
});

test("everything is on show until somebody zooms", () => {
  assert.deepEqual(strip.visibleRange(null, 1), { from: 0, to: 5 });
  assert.deepEqual(strip.visibleRange(null, 1, true), { from: 0, to: 1 });
  assert.deepEqual(strip.visibleRange(null, 60), { from: 0, to: 60 });
  assert.deepEqual(strip.visibleRange({ follow: true, span: 10 }, 60), { from: 50, to: 60 });
});

test("keys zoom about the newest, move, and go back", () => {
  const zoomAfter = (view, key, now = 60) => strip.navigate(view, key, now).zoom;
  const near = zoomAfter(null, "+");
  assert.deepEqual(near, { follow: true, span: 30 });
  const moved = zoomAfter(near, "ArrowLeft");
  assert.deepEqual(moved, { from: 24, to: 54 });
  assert.deepEqual(zoomAfter(moved, "+"), { from: 31.5, to: 46.5 });
  assert.deepEqual(zoomAfter(moved, "ArrowRight"), { follow: true, span: 30 });
  assert.deepEqual(zoomAfter(moved, "End"), { follow: true, span: 30 });
  assert.deepEqual(zoomAfter({ follow: true, span: 10 }, "-"), { follow: true, span: 20 });
  assert.deepEqual(zoomAfter({ from: 0, to: 10 }, "-"), { from: 0, to: 20 });
  assert.equal(zoomAfter(moved, "-"), null);
  assert.equal(zoomAfter(moved, "Home"), null);
  assert.equal(zoomAfter(null, "ArrowLeft"), null);
  assert.equal(strip.navigate(null, "x", 60), null);
  let view = near;
  for (let i = 0; i < 50; i++) view = zoomAfter(view, "ArrowLeft");
  assert.equal(view.from, 0);
});

test("a row's pixels show what took most of their time", () => {
  const segments = [segment(RUNNING, 0, 4), segment(WAITING, 4, 4.7), segment(RUNNING, 4.7, 5), segment(DONE, 8, 8.1)];
  const found = strip.rowRuns(segments, { from: 0, to: 10, width: 10, now: 10, config });
  assert.deepEqual(found, [
    { left: 0, right: 4, kind: RUNNING },
    { left: 4, right: 5, kind: WAITING },
    { left: 8, right: 10, kind: DONE },
  ]);
  const zoomed = strip.rowRuns(segments, { from: 9, to: 10, width: 4, now: 10, config });
  assert.deepEqual(zoomed, [{ left: 0, right: 4, kind: DONE }]);
  assert.deepEqual(strip.rowRuns([], { from: 0, to: 1, width: 4, now: 1, config }), []);
});

test("a row ends where its samples end, unless the rank is through", () => {
  assert.equal(strip.openEnd(segment(RUNNING, 0, 9), 10, config), 10);
  assert.equal(strip.openEnd(segment(RUNNING, 0, 7), 10, config), 7);
  assert.equal(strip.openEnd(segment(DEAD, 0, 1), 10, config), 10);
});

test("the pointer finds the segment below it, and nothing where nothing is known", () => {
  const segments = [segment(RUNNING, 1, 4), segment(RUNNING, 7, 8), segment(WAITING, 8, 9)];
  const at = (time) => strip.segmentAt(segments, time, 10, config)?.segment ?? null;
  assert.equal(at(0.5), null);
  assert.equal(at(2), segments[0]);
  assert.equal(at(5), null);
  assert.equal(at(7.5), segments[1]);
  assert.equal(at(9.9), segments[2]);
  assert.equal(strip.segmentAt([], 1, 10, config), null);
});

test("alerts appear once: failures, deaths, long waits", () => {
  const store = strip.newStore(2);
  const seen = new Map();
  const tell = (now) => strip.newAlerts(store, now, config, seen);
  store.rows[1].segments.push(segment(WAITING, 0, 4, { call: "recv", line: 3 }));
  assert.equal(tell(4), "");
  store.rows[1].segments[0].end = 6;
  assert.equal(tell(6), "rank 2 waiting in recv, line 3, 6.0 s");
  assert.equal(tell(6.5), "");
  store.rows[1].segments.push(segment(FAILED, 6.6, 6.6));
  assert.equal(tell(7), "rank 2 failed after 6.6 s");
});

test("rows of many ranks become lines that share labels", () => {
  const sizes = [8, 64, 65, 128, 1024, 4096];
  assert.deepEqual(sizes.map(strip.rowHeight), [24, 14, 13, 7, 1, 1]);
  assert.deepEqual(sizes.map(strip.rowsPerLabel), [1, 1, 2, 2, 14, 14]);
  const labelled = { ...config, paints: config.paints.map((paint) => ({ ...paint, label: paint.name })) };
  const rows = [RUNNING, WAITING, WAITING].map((kind) => ({ segments: [segment(kind, 0, 4)] }));
  assert.equal(strip.describeRows([...rows, { segments: [] }], 4, labelled), "2 waiting, 1 running, 1 no sample yet");
  assert.equal(strip.describeRows(rows.slice(0, 1), 4, labelled), "running");
});

test("alerts of many ranks at once are counted", () => {
  const ranks = Array.from({ length: 1024 }, (_, rank) => rank);
  const store = strip.newStore(ranks.length);
  for (const { segments } of store.rows) segments.push(segment(FAILED, 1, 1));
  const text = strip.newAlerts(store, 2, { ...config, ranks }, new Map());
  assert.ok(text.startsWith("rank 0 failed after 1.0 s"));
  assert.ok(text.endsWith("rank 7 failed after 1.0 s, and 1016 more"));
});
