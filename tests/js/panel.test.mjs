// The pure functions of axon_nb/lab/labextension/static, run by node's own test runner.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import test from "node:test";

const path = new URL("../../axon_nb/lab/labextension/static/words.js", import.meta.url);
const words = await import(`data:text/javascript,${encodeURIComponent(readFileSync(path))}`);

const cluster = { id: "a1", name: "digits", state: "attached", num_ranks: 4, kernel: null };

function status(cells, more = {}) {
  const ranks = cells.map((cell, rank) => ({ rank, cell, state: "", memory_bytes: 0, device_bytes: 0 }));
  return { running: true, busy: "", dead: "", slowed: "", share: false, verdict: "", ranks, ...more };
}

test("a state is a few words", () => {
  const { summarize } = words;
  assert.equal(summarize(cluster, status([null, null])), "4 ranks, idle");
  assert.equal(summarize({ ...cluster, num_ranks: 1 }, status([null])), "1 rank, idle");
  assert.equal(summarize(cluster, status([7, null], { busy: "0" })), "4 ranks, running In [7]");
  assert.equal(summarize(cluster, status([7, 8], { busy: "0-1" })), "4 ranks, running");
  assert.equal(summarize(cluster, status([], { dead: "1,3" })), "4 ranks, idle, ranks 1,3 dead");
  assert.equal(summarize(cluster, status([], { slowed: "rank 2 × 2" })), "4 ranks, idle, slowed: rank 2 × 2");
  assert.equal(summarize(cluster, status([], { running: false })), "4 ranks, stopped");
  assert.equal(summarize(cluster, null), "4 ranks, no reply");
  assert.equal(summarize({ ...cluster, state: "detached" }, null), "4 ranks, detached");
});

test("a rank at a breakpoint is paused, and does not run", () => {
  const paused = status([20, 20], { busy: "0-1" });
  paused.ranks[1].state = "paused at line 5";
  assert.equal(words.summarize(cluster, paused), "4 ranks, In [20] is paused");
  assert.ok(words.isPaused(paused));
});

test("rows of waiting ranks are short, and their length does not change with the seconds", () => {
  const short = (seconds) => words.shortState(`waiting in all_reduce at line 4 for rank 2, for ${seconds} s`);
  assert.equal(short("2.1"), "waits for rank 2 ·\u00a02.1\u00a0s");
  assert.equal(short("11.0"), "waits for rank 2 ·\u00a011\u00a0s");
  assert.ok(short("11.0").length <= short("9.9").length);
  assert.equal(words.shortState("running line 4"), "running line 4");
  assert.equal(words.unbroken("Interrupted the cell on ranks 0-3."), "Interrupted the cell on ranks 0\u20113.");
});

test("ranks are counted out", () => {
  assert.deepEqual(words.expandRanks("0,2-4"), [0, 2, 3, 4]);
  assert.deepEqual(words.expandRanks(""), []);
});

test("bytes have three digits and a binary unit", () => {
  const shown = [0, 512, 1536, 47 * 2 ** 20, 253_755_392, 2 ** 40].map(words.formatBytes);
  assert.deepEqual(shown, ["–", "512 B", "1.50 KiB", "47.0 MiB", "242 MiB", "1.00 TiB"]);
});
