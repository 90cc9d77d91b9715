// The layout functions of axon_nb/widgets/static/shards/layout.js, run by node's own test runner.

import assert from "node:assert/strict";
import test from "node:test";

import { load } from "./load.mjs";

const shards = await load("shards/layout");

const area = (box) => box.width * box.height;

test("areas of a treemap are in proportion, within the frame, and do not overlap", () => {
  const values = [6, 6, 4, 3, 2, 2, 1, 0];
  const boxes = shards.treemap(values, 600, 400);
  for (const [i, value] of values.entries()) assert.ok(Math.abs(area(boxes[i]) - value * 10000) < 1e-6);
  for (const box of boxes.slice(0, 7)) {
    assert.ok(box.x >= -1e-9 && box.y >= -1e-9 && box.x + box.width <= 600 + 1e-6 && box.y + box.height <= 400 + 1e-6);
    const ratio = Math.max(box.width / box.height, box.height / box.width);
    assert.ok(ratio < 4, `${ratio} is not a square`);
  }
  for (let i = 0; i < 7; i++) {
    for (let j = i + 1; j < 7; j++) {
      const [a, b] = [boxes[i], boxes[j]];
      const wide = Math.min(a.x + a.width, b.x + b.width) - Math.max(a.x, b.x);
      const tall = Math.min(a.y + a.height, b.y + b.height) - Math.max(a.y, b.y);
      assert.ok(wide < 1e-6 || tall < 1e-6, `${i} and ${j} overlap`);
    }
  }
});

test("a treemap of nothing has no area", () => {
  assert.deepEqual(shards.treemap([], 100, 100), []);
  assert.deepEqual(shards.treemap([0, 0], 100, 100).map(area), [0, 0]);
});

test("names lose their start, never their end", () => {
  assert.equal(shards.shortName("module.blocks.3.attention.qkv.weight", 40), "module.blocks.3.attention.qkv.weight");
  assert.equal(shards.shortName("module.blocks.3.attention.qkv.weight", 20), "attention.qkv.weight");
  assert.equal(shards.shortName("module.blocks.3.attention.qkv.weight", 9), "weight");
  assert.equal(shards.shortName("weight", 3), "");
  assert.equal(shards.shortName("up.weight: exp_avg", 10), "exp_avg");
});

test("tensors are grouped by module, and modules with one child are one with it", () => {
  const tensors = ["a.b.x", "a.b.y", "a.c", "a.b"].map((name) => ({ name, bytes: 1 }));
  const root = shards.groupByModule(tensors);
  assert.deepEqual([root.name, root.bytes, root.children.map(({ name }) => name)], ["a", 4, ["b", "c", "b"]]);
  assert.deepEqual(
    root.children[0].children.map(({ index }) => index),
    [0, 1],
  );
});

test("a nested treemap has each tensor once, within its module, at any width", () => {
  const tensors = [];
  for (let block = 0; block < 12; block++) {
    for (const part of ["norm.weight", "attention.qkv.weight", "mlp.up.weight", "mlp.down.weight"]) {
      tensors.push({ name: `blocks.${block}.${part}`, bytes: part === "norm.weight" ? 10 : 4000 });
    }
  }
  for (const width of [240, 700, 1560]) {
    const tiles = shards.nestedTreemap(tensors, width, 380);
    const own = tiles.filter(({ index }) => index >= 0);
    assert.deepEqual(
      own.map(({ index }) => index).sort((a, b) => a - b),
      [...tensors.keys()],
      "small ones, too",
    );
    for (const { x, y, width: w, height: h, label, index } of tiles) {
      assert.ok(x >= -1e-6 && y >= -1e-6 && x + w <= width + 1e-6 && y + h <= 380 + 1e-6, `outside of ${width}`);
      assert.ok(6.3 * label.length <= w, "a name is wider than its box");
      if (index >= 0 && label) assert.ok(tensors[index].name.endsWith(label));
    }
  }
});

test("the filter wants each of its words, anywhere", () => {
  const tensors = [
    { name: "block0.up.weight", role: "parameter", kind: "sharded", placement: "rows over tp (2)" },
    { name: "block1.up.weight", role: "gradient", kind: "sharded", placement: "columns over dp (2)" },
  ];
  const names = (filter) => shards.filterTensors(tensors, filter).map((tensor) => tensor.name);
  assert.deepEqual(names(""), ["block0.up.weight", "block1.up.weight"]);
  assert.deepEqual(names("UP dp"), ["block1.up.weight"]);
  assert.deepEqual(names("block0 gradient"), []);
});

test("what lies differently than before is found by role and name", () => {
  const tensor = (name, placement, drawing) => ({ name, role: "parameter", placement, drawing });
  const before = { tensors: [tensor("a", "rows", 0), tensor("b", "rows", 0)], drawings: [{ width: 1 }] };
  const after = { tensors: [tensor("b", "rows", 1), tensor("a", "copies", 0), tensor("c", "rows", 1)] };
  after.drawings = [{ width: 2 }, { width: 1 }];
  assert.deepEqual([...shards.changedTensors(before, after)].sort(), ["parameter a", "parameter c"]);
  assert.equal(shards.changedTensors(null, after).size, 0);
});

test("tensors of repeated blocks are folded, those that differ are not", () => {
  const tensor = (name, drawing = 0) => ({
    name,
    role: "parameter",
    shape: "2 × 2",
    placement: "rows",
    local: "8 B",
    drawing,
  });
  const blocks = [0, 1, 2, 3, 5].map((i) => tensor(`blocks.${i}.up.weight`));
  const folded = shards.foldTensors([tensor("head.weight"), ...blocks, tensor("blocks.4.up.weight", 1)]);
  assert.deepEqual(
    folded.map(({ name, tensors }) => [name, tensors.length]),
    [
      ["head.weight", 1],
      ["blocks.0-3,5.up.weight", 5],
      ["blocks.4.up.weight", 1],
    ],
  );
  assert.equal(shards.foldTensors([tensor("layer1.w"), tensor("layer2.w")])[0].name, "layer1-2.w");
});

test("a tile that is too narrow for its name has it from top to bottom", () => {
  const [tile] = shards.nestedTreemap([{ name: "up.weight", bytes: 1 }], 30, 200);
  assert.deepEqual([tile.label, tile.isTurned], ["up.weight", true]);
  assert.equal(shards.nestedTreemap([{ name: "up.weight", bytes: 1 }], 200, 30)[0].isTurned, false);
});
