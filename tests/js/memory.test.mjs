// The pure functions of axon_nb/widgets/static/memory.js, run by node's own test runner.

import assert from "node:assert/strict";
import test from "node:test";

import { load } from "./load.mjs";

const memory = await load("memory");

test("lengths stay within the bar", () => {
  assert.equal(memory.percent(0.12345), "12.35%");
  assert.equal(memory.percent(1.5), "100.00%");
  assert.equal(memory.percent(-1), "0.00%");
});

test("a rank is told with all its bars, and why it is flagged", () => {
  const row = { rank: 3, measured: { words: "1 MiB" }, estimated: null, process: { words: "300 MiB resident" }, flag: "" };
  assert.equal(memory.said(row), "rank 3: 1 MiB; 300 MiB resident");
  const flagged = { ...row, estimated: { words: "estimate: 2 MiB" }, flag: "98 % is taken." };
  assert.equal(memory.said(flagged), "rank 3: 1 MiB; estimate: 2 MiB; 300 MiB resident; 98 % is taken.");
});

test("only ranks that were not flagged before are news", () => {
  const before = [{ rank: 0, flag: "full" }, { rank: 1, flag: "" }];
  const after = [{ rank: 0, flag: "full" }, { rank: 1, flag: "full" }];
  assert.deepEqual(memory.news(before, after), ["rank 1: full"]);
  assert.deepEqual(memory.news(after, after), []);
});
