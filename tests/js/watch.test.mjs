// The pure functions of axon_nb/widgets/static/watch/points.js, run by node's own test runner.

import assert from "node:assert/strict";
import test from "node:test";

import { load } from "./load.mjs";

const watch = await load("watch/points");

const FRAME = { left: 0, top: 0, width: 100, height: 10 };

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

test("a range holds all values, and a curve without height is in its middle", () => {
  const points = { steps: [0, 1], lows: [1, 2], means: [2, 3], highs: [3, 10] };
  assert.deepEqual(watch.valueSpan(points, false), { low: 1, high: 10, logarithmic: false });
  const flat = { steps: [0], lows: [5], means: [5], highs: [5] };
  assert.equal(watch.positionOf(5, watch.valueSpan(flat, false)), 0.5);
  assert.ok(Math.abs(watch.positionOf(5, watch.valueSpan(flat, true)) - 0.5) < 1e-9);
  const zero = { steps: [0], lows: [0], means: [0], highs: [0] };
  assert.equal(watch.positionOf(0, watch.valueSpan(zero, false)), 0.5);
});

test("a logarithmic range is one only above zero", () => {
  const above = { steps: [0, 1], lows: [0.01, 1], means: [0.1, 1], highs: [1, 1] };
  const span = watch.valueSpan(above, true);
  assert.ok(span.logarithmic);
  assert.ok(Math.abs(watch.positionOf(0.1, span) - 0.5) < 1e-9);
  assert.equal(watch.valueSpan({ ...above, lows: [0, 1] }, true).logarithmic, false);
});

test("paths go from the left to the right edge, lows below highs", () => {
  const points = { steps: [10, 20], lows: [0, 0], means: [5, 5], highs: [10, 10] };
  const { line, band } = watch.paths(points, watch.valueSpan(points, false), FRAME);
  assert.equal(line, "M0.0 5.0L100.0 5.0");
  assert.equal(band, "M0.0 0.0L100.0 0.0L100.0 10.0L0.0 10.0z");
  assert.deepEqual(watch.paths(watch.decode(), watch.valueSpan(watch.decode(), false), FRAME), { line: "", band: "" });
});

test("the nearest point is found by its step, not by its place in the list", () => {
  const points = { steps: [0, 1, 100] };
  assert.equal(watch.nearest(points, 0.3), 1);
  assert.equal(watch.nearest(points, 0.8), 2);
  assert.equal(watch.nearest({ steps: [] }, 0.5), -1);
});

test("numbers have at most four digits", () => {
  assert.equal(watch.formatValue(2.3061234, "number"), "2.306");
  assert.equal(watch.formatValue(12345, "number"), "12345");
  assert.equal(watch.formatValue(0.00001234, "number"), "1.234e-5");
  assert.equal(watch.formatValue(1.5e7 + 0.5, "number"), "1.500e+7");
  assert.equal(watch.formatValue(0.375, "share"), "38 %");
  assert.equal(watch.formatValue(300 * 2 ** 20, "bytes"), "300 MiB");
  assert.equal(watch.formatValue(12, "bytes"), "12 B");
});

test("a point in words names the spread only where there is one", () => {
  const points = { steps: [3], lows: [1], means: [1.5], highs: [2] };
  assert.equal(watch.describe(points, 0, { kind: "number", axis: "steps" }), "step 3: 1.5 (1 to 2 over ranks)");
  const same = { steps: [3], lows: [1], means: [1], highs: [1] };
  assert.equal(watch.describe(same, 0, { kind: "number", axis: "seconds" }), "after 3 s: 1");
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
