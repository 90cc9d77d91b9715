"""The browser reads the spans that the kernel packs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from axon_nb.cluster.inspection.spans import SpanStore
from axon_nb.records.spans import Span
from axon_nb.widgets.html import SPAN_CODES
from axon_nb.widgets.timeline.view import BYTES_PER_SPAN, pack
from tests.support.node import node, saved

READ = """
import { readFileSync } from "node:fs";
const [script, ...messages] = process.argv.slice(1);
const { decode, merge, newStore } = await import(`data:text/javascript,${encodeURIComponent(readFileSync(script))}`);
const store = newStore(1);
const whole = messages.map((path) => merge(store, decode(new DataView(Uint8Array.from(readFileSync(path)).buffer))));
const columns = {};
for (const [name, column] of Object.entries(store.columns)) columns[name] = [...column.subarray(0, store.count)];
console.log(JSON.stringify({ whole, columns, labels: store.labels, lost: store.lost }));
"""
HEADER = {"groups": {}, "oldest": 0, "dropped": 0, "now": 1.0, "focus": [None, None], "finished": False}
SECOND = 1_000_000_000


def test_browser_reads_what_the_kernel_packs(tmp_path: Path) -> None:
    store = SpanStore()
    store.set_groups({"größte": [0, 1]})
    store.add([Span(0, "collective", "all_reduce", 2 * SECOND, 5 * SECOND, "größte", 1 << 31, -1, -1, 1, 7)])
    labels = [[SPAN_CODES["collective"], "all_reduce", "größte"]]
    first = pack(store.table(), {**HEADER, "labels": labels, "labelsFrom": 0, "lost": 0}, origin_ns=SECOND)
    assert len(first) % 2 == 0
    store.add([Span(1, "collective", "all_reduce", 3 * SECOND, 5 * SECOND, "größte", 7, -1, -1, 1)])
    store.add([Span(1, "forward", "F", 6 * SECOND, 6 * SECOND, "1", 0, 2, 40_000, 0)])
    more = {**HEADER, "labels": [[SPAN_CODES["forward"], "F", "1"]], "labelsFrom": 1, "lost": 4}
    patches, _ = store.patches(0)
    second = pack(store.table(1), more, origin_ns=SECOND, patches=patches[:1])
    paths = [tmp_path / "first", tmp_path / "second"]
    for path, content in zip(paths, (first, second), strict=True):
        path.write_bytes(content)
    read = json.loads(
        node("--input-type=module", "-e", READ, "--", saved("timeline/store", tmp_path), *map(str, paths))
    )
    assert read["whole"] == [True, True]
    assert read["labels"] == [*labels, *more["labels"]]
    assert read["lost"] == 4
    assert read["columns"] == {
        "start": [1, 2, 5],
        "duration": [3, 2, 0],
        "bytes": [1 << 31, 7, 0],
        "late": [1, 0, 0],
        "sequence": [1, 1, 0],
        "label": [0, 0, 1],
        "rank": [0, 1, 1],
        "line": [7, 0, 0],
        "stage": [-1, -1, 2],
        "microbatch": [-1, -1, 32767],
        "by": [1, 1, -1],
    }


@pytest.mark.parametrize("count", [0, 1, 7, 1000])
def test_packed_span_is_small(count: int) -> None:
    store = SpanStore()
    store.add(Span(0, "forward", "F", i, i + 1) for i in range(count))
    empty = len(pack(store.table(count), {}, origin_ns=0))
    assert len(pack(store.table(), {}, origin_ns=0)) <= empty + BYTES_PER_SPAN * count + 8
