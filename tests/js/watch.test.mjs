// The pure functions of axon_nb/widgets/static/watch/points.js, run by node's own test runner.

import assert from "node:assert/strict";
import test from "node:test";

import { load } from "./load.mjs";

const watch = { ...(await load("watch/points")), ...(await load("shared/chart")), ...(await load("shared/scale")) };

const FRAME = { left: 0, right: 100, top: 0, bottom: 10 };
const GIB = 2 ** 30;

/** Bytes as the kernel packs them. */
function packed(steps, lows, means, highs) {
  return new DataView(Float32Array.from([...steps, ...lows, ...means, ...highs]).buffer);
}

test("points are read by columns", () => {
  const points = watch.decode(packed([0, 2], [1, 2], [3, 4], [5, 6]));
  assert.deepEqual(points, { steps: [0, 2], lows: [1, 2], means: [3, 4], highs: [5, 6] });
  assert.deepEqual(watch.decode(undefined).steps, []);
  assert.deepEqual(watch.decode(new DataView(new ArrayBuffer(0))).steps, []);
});

/** A curve that is the same on all ranks. */
const flat = (...means) => ({ steps: means.map((_, i) => i), lows: means, means, highs: means });
const ends = ({ low, high }) => [low, high];
const heightOf = (value, span) => watch.positionOf(value, span);

test("axes of rates, shares and bytes begin at zero", () => {
  for (const kind of ["rate", "share", "bytes"]) {
    const span = watch.valueSpan(flat(6.4, 5.4), kind);
    assert.equal(watch.yTicks(span, kind)[0].at, 0);
  }
  const rate = watch.valueSpan(flat(6.4, 5.4), "rate");
  assert.deepEqual(ends(rate), [0, 8]);
  assert.ok(heightOf(6.4, rate) - heightOf(5.4, rate) < 1 / 6, "a fall by a sixth does not span the axis");
  const bytes = watch.valueSpan(flat(61 * GIB, 62.2 * GIB), "bytes");
  assert.ok(heightOf(62.2 * GIB, bytes) - heightOf(61 * GIB, bytes) < 0.03);
  assert.deepEqual(
    watch.yTicks(bytes, "bytes").map(({ label }) => label),
    ["0", "20 GiB", "40 GiB", "60 GiB", "80 GiB"],
  );
  assert.deepEqual(ends(watch.valueSpan(flat(0.7, 0.9), "share")), [0, 1]);
  assert.deepEqual(
    watch
      .yTicks(watch.valueSpan(flat(0.31), "share"), "share")
      .map(({ label }) => label)
      .at(-1),
    "40%",
  );
});

test("ticks are at round numbers and hold all values", () => {
  const points = { steps: [0, 1], lows: [1.5, 2], means: [2, 3], highs: [3, 5.8] };
  const span = watch.valueSpan(points, "number");
  assert.deepEqual(ends(span), [0, 6]);
  assert.deepEqual(
    watch.yTicks(span, "number").map(({ label }) => label),
    ["0", "2", "4", "6"],
  );
  assert.deepEqual(ends(watch.valueSpan(flat(101, 104), "number")), [101, 104]);
  assert.deepEqual(ends(watch.valueSpan(flat(), "number")), [0, 1]);
  for (const value of [0, 5, -5, 1e-9, 1e9]) {
    const alone = watch.valueSpan(flat(value), "number");
    assert.ok(alone.low <= value && value <= alone.high && alone.low < alone.high, `${value}`);
  }
});

test("noise does not fill the axis", () => {
  const span = watch.valueSpan(flat(1000, 1000.1), "number");
  assert.ok(heightOf(1000.1, span) - heightOf(1000, span) < 0.02);
});

test("an outlier leaves the axis to the others, and comes back if all are wanted", () => {
  const values = Array.from({ length: 100 }, (_, i) => (i === 50 ? 90 : 1 + (i % 7) / 10));
  assert.ok(watch.valueSpan(flat(...values), "number").high <= 2);
  assert.ok(watch.valueSpan(flat(...values), "number", { all: true }).high >= 90);
});

test("a logarithmic range is one only above zero, and never for shares", () => {
  const above = { steps: [0, 1], lows: [0.01, 1], means: [0.1, 1], highs: [1, 1] };
  const span = watch.valueSpan(above, "number", { logarithmic: true });
  assert.ok(span.logarithmic);
  assert.ok(Math.abs(watch.positionOf(0.1, span) - 0.5) < 1e-9);
  assert.deepEqual(
    watch
      .yTicks(span, "number")
      .map(({ at }) => at)
      .filter((at) => [0.01, 0.1, 1].includes(at)),
    [0.01, 0.1, 1],
  );
  assert.equal(watch.valueSpan({ ...above, lows: [0, 1] }, "number", { logarithmic: true }).logarithmic, false);
  assert.equal(watch.valueSpan(above, "share", { logarithmic: true }).logarithmic, false);
});

test("paths go from the left to the right edge, lows below highs", () => {
  const points = { steps: [10, 20], lows: [0, 0], means: [5, 5], highs: [10, 10] };
  const span = { low: 0, high: 10, logarithmic: false };
  const { line, band } = watch.paths(points, points.means, span, FRAME, false);
  assert.equal(line, "M0.0 5.0L100.0 5.0");
  assert.equal(band, "M0.0 0.0L100.0 0.0L100.0 10.0L0.0 10.0z");
  assert.deepEqual(watch.paths(watch.decode(), [], span, FRAME, false), { line: "", band: "" });
});

test("curves of several cells share one axis", () => {
  const [early, late] = [flat(1, 2), { ...flat(3, 4, 5), steps: [4, 5, 8] }];
  assert.deepEqual(watch.extentOf([late, early]), { first: 0, last: 8 });
  assert.deepEqual(watch.extentOf([flat()]), { first: 0, last: 1 });
  const span = { low: 0, high: 10, logarithmic: false };
  const { line } = watch.paths(late, late.means, span, FRAME, false, watch.extentOf([early, late]));
  assert.ok(line.startsWith("M50.0 "), "it begins where its cell begins");
  assert.deepEqual(ends(watch.valueSpan(watch.joined([early, late]), "number")), [0, 5]);
});

test("a value that steps is drawn in steps, and nothing else is", () => {
  const rate = flat(...[4, 4, 4, 4, 2, 2, 2, 2, 1, 1, 1, 1]);
  assert.ok(watch.isStepped(rate));
  const { line } = watch.paths(rate, rate.means, { low: 0, high: 4, logarithmic: false }, FRAME, true);
  assert.deepEqual([...new Set(line.replace(/[^A-Z]/g, ""))].sort(), ["H", "M", "V"]);
  assert.ok(!watch.isStepped(flat(5, 4, 3, 2.5, 2.2, 2.1)));
  assert.ok(!watch.isStepped(flat(3, 3, 3, 3, 3)), "a line will do");
});

test("smoothing keeps the level and forgets noise", () => {
  assert.deepEqual(
    watch.smoothed([2, 2, 2], 0.9).map((value) => Math.round(1e9 * value) / 1e9),
    [2, 2, 2],
  );
  const noisy = Array.from({ length: 50 }, (_, i) => (i % 2 ? 1 : 3));
  assert.ok(
    watch
      .smoothed(noisy, 0.9)
      .slice(10)
      .every((value) => Math.abs(value - 2) < 0.2),
  );
});

test("steps are labelled at round numbers, seconds as a clock", () => {
  const labels = (steps, axis) => watch.xTicks(steps, axis, 4).map(({ label }) => label);
  assert.deepEqual(labels([0, 412], "steps"), ["step 0", "100", "200", "300", "400"]);
  assert.deepEqual(labels([0, 3], "steps"), ["step 0", "1", "2", "3"]);
  assert.deepEqual(labels([0, 190], "seconds"), ["time 0:00", "1:00", "2:00", "3:00"]);
  assert.deepEqual(labels([7], "steps"), ["7"]);
});

test("the nearest point is found by its step, not by its place in the list", () => {
  const points = { steps: [0, 1, 100] };
  assert.equal(watch.nearest(points, 30), 1);
  assert.equal(watch.nearest(points, 80), 2);
  assert.equal(watch.nearest({ steps: [] }, 0.5), -1);
});

test("numbers have at most four digits", () => {
  assert.equal(watch.formatValue(2.3061234, "number"), "2.306");
  assert.equal(watch.formatValue(12345, "number"), "12345");
  assert.equal(watch.formatValue(0.00001234, "number"), "1.234e-5");
  assert.equal(watch.formatValue(1.5e7 + 0.5, "number"), "1.5e+7");
  assert.equal(watch.formatValue(0.375, "share"), "38 %");
  assert.equal(watch.formatValue(300 * 2 ** 20, "bytes"), "300 MiB");
  assert.equal(watch.formatValue(12, "bytes"), "12 B");
});

test("a point in words names the spread only where there is one", () => {
  const points = { steps: [3], lows: [1], means: [1.5], highs: [2] };
  assert.equal(watch.describeValue(points, 0, "number"), "1.5 (1 to 2 over ranks)");
  assert.equal(watch.describeValue(flat(1), 0, "number"), "1");
  assert.equal(watch.describeStep(3, "steps"), "step 3");
  assert.equal(watch.describeStep(3, "seconds"), "after 3 s");
});

test("keys move the cursor within the curve and leave other keys alone", () => {
  assert.equal(watch.moveCursor(-1, 5, "ArrowLeft"), 4);
  assert.equal(watch.moveCursor(-1, 5, "ArrowRight"), 0);
  assert.equal(watch.moveCursor(4, 5, "ArrowRight"), 4);
  assert.equal(watch.moveCursor(0, 5, "ArrowLeft"), 0);
  assert.equal(watch.moveCursor(2, 5, "Home"), 0);
  assert.equal(watch.moveCursor(2, 5, "End"), 4);
  assert.equal(watch.moveCursor(2, 5, "Escape"), -1);
  assert.equal(watch.moveCursor(2, 5, "a"), null);
  assert.equal(watch.moveCursor(2, 0, "End"), null);
});
