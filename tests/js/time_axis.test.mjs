// The pure functions of axon_nb/widgets/static/shared/time_axis.js, run by node's own test runner.

import assert from "node:assert/strict";
import test from "node:test";

import { load } from "./load.mjs";

const { rescaleRange, ticks } = await load("shared/time_axis");

test("ticks of a strip are few, round and labelled by their size", () => {
  const strip = (from, to, width) => ticks(from, to, width, { minStep: 0.01, minutes: true });
  const labels = (from, to, width) => strip(from, to, width).map(({ label }) => label);
  assert.deepEqual(labels(0, 5, 600), ["0 s", "1 s", "2 s", "3 s", "4 s", "5 s"]);
  assert.deepEqual(labels(1, 2, 300), ["1.0 s", "1.5 s", "2.0 s"]);
  assert.deepEqual(labels(0, 180, 400), ["0 s", "1:00", "2:00", "3:00"]);
  assert.deepEqual(labels(0, 10800, 400), ["0 s", "1:00:00", "2:00:00", "3:00:00"]);
  assert.deepEqual(labels(61, 62, 300), ["1:01.0", "1:01.5", "1:02.0"]);
  assert.deepEqual(labels(119.98, 120, 300), ["1:59.98", "1:59.99", "2:00.00"]);
  for (const span of [0.1, 1, 7, 100, 5000, 86400]) assert.ok(strip(0, span, 500).length <= 7);
  assert.equal(strip(0, 4, 400)[1].x, 100);
});

test("ticks of a timeline are round, few, and counted from the cell's start", () => {
  const labels = (from, to, zero, width) => ticks(from, to, width, { zero }).map(({ label }) => label);
  assert.deepEqual(labels(100, 110, 100, 1000).slice(0, 3), ["0 s", "1 s", "2 s"]);
  assert.deepEqual(labels(99, 100, 100, 300), ["-1.0 s", "-0.5 s", "0.0 s"]);
  assert.deepEqual(labels(0, 240, 120, 400), ["−2:00", "−1:00", "0 s", "1:00", "2:00"]);
  assert.deepEqual(labels(5, 5.001, 5, 500).slice(0, 3), ["0.0 ms", "0.2 ms", "0.4 ms"]);
  assert.deepEqual(labels(61, 62, 0, 300), ["61.0 s", "61.5 s", "62.0 s"]);
  assert.deepEqual(labels(0, 1200, 0, 400), ["0 s", "5:00", "10:00", "15:00", "20:00"]);
  assert.ok(labels(0, 7000, 0, 1000).length <= 12);
  assert.equal(labels(0, 0.35, 0, 300).at(-1), "200 ms");
});

test("a range is rescaled about a time, which stays at its place", () => {
  assert.deepEqual(rescaleRange({ from: 0, to: 10 }, 0.5, { minLength: 0, time: 2 }), { from: 1, to: 6 });
  assert.deepEqual(rescaleRange({ from: 0, to: 10 }, 2, { minLength: 0 }), { from: -5, to: 15 });
  assert.deepEqual(rescaleRange({ from: 0, to: 10 }, 0.5, { minLength: 8 }), { from: 1, to: 9 });
});
