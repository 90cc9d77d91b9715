// The pure functions of axon_nb/widgets/static/memory, run by node's own test runner.

import assert from "node:assert/strict";
import test from "node:test";

import { load } from "./load.mjs";

const bars = await load("memory/bars");
const whatIf = await load("memory/what_if");

test("lengths stay within the bar", () => {
  assert.equal(bars.percent(0.12345), "12.35%");
  assert.equal(bars.percent(1.5), "100.00%");
  assert.equal(bars.percent(-1), "0.00%");
});

test("a rank is described with all its bars and the cause of its flag", () => {
  const row = {
    rank: 3,
    measured: { text: "1 MiB" },
    estimated: null,
    process: { text: "300 MiB resident" },
    flag: "",
  };
  assert.equal(bars.describeRow(row), "rank 3: 1 MiB; 300 MiB resident");
  const flagged = { ...row, estimated: { text: "estimate: 2 MiB" }, flag: "98 % is taken." };
  assert.equal(bars.describeRow(flagged), "rank 3: 1 MiB; estimate: 2 MiB; 300 MiB resident; 98 % is taken.");
});

test("only ranks that were not flagged before are news", () => {
  const before = [
    { rank: 0, flag: "full" },
    { rank: 1, flag: "" },
  ];
  const after = [
    { rank: 0, flag: "full" },
    { rank: 1, flag: "full" },
  ];
  assert.deepEqual(bars.newFlags(before, after), ["rank 1: full"]);
  assert.deepEqual(bars.newFlags(after, after), []);
});

const FIELDS = [
  { name: "world_size", current: 4 },
  { name: "strategy", current: "full_shard" },
  { name: "shard", current: 4 },
  { name: "activation_checkpointing", current: false },
];

test("only what differs is asked, and only where it has a meaning", () => {
  const same = { world_size: "4", strategy: "full_shard", shard: "2", activation_checkpointing: false };
  assert.deepEqual(whatIf.difference(FIELDS, same), {});
  assert.deepEqual(whatIf.difference(FIELDS, { ...same, world_size: "8", activation_checkpointing: true }), {
    world_size: "8",
    activation_checkpointing: true,
  });
  assert.deepEqual(whatIf.difference(FIELDS, { ...same, strategy: "hybrid_shard" }), {
    strategy: "hybrid_shard",
    shard: "2",
  });
  assert.ok(!whatIf.applies("shard", same));
});

test("progress has its share where it is known", () => {
  assert.equal(whatIf.progressText("simulating: a step", 0.256), "simulating: a step (26 %)");
  assert.equal(whatIf.progressText("asking a rank", null), "asking a rank");
  assert.equal(whatIf.progressText("", 0.5), "");
});
