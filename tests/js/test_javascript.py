"""The widgets' JavaScript: node runs its tests, and reads what the kernel packs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from axon_nb.records.telemetry import Activity, RankState
from axon_nb.widgets.cell.activity import Clock, RankHistory, encode
from axon_nb.widgets.html import ACTIVITY_CODES
from axon_nb.widgets.watch.store import Point, pack_points
from tests.support.node import node, saved

HERE = Path(__file__).parent

READ = """
import { readFileSync } from "node:fs";
const [script, ...messages] = process.argv.slice(1);
const { decode, merge, newStore } = await import(`data:text/javascript,${encodeURIComponent(readFileSync(script))}`);
const store = newStore(2);
const whole = messages.map((path) => merge(store, decode(new DataView(Uint8Array.from(readFileSync(path)).buffer))));
console.log(JSON.stringify({ whole, ...store }));
"""


@pytest.mark.parametrize("path", sorted(HERE.glob("*.test.mjs")), ids=lambda path: path.name)
def test_script(path: Path) -> None:
    node("--test", str(path))


def test_browser_reads_what_the_kernel_packs(tmp_path: Path) -> None:
    histories = [RankHistory(0), RankHistory(5)]
    histories[0].add(RankState(0, Activity.RUNNING, 0, line=2), now=0.5, since=0.25)
    histories[1].add(RankState(5, Activity.RUNNING, 0, line=3), now=0.5, since=0.0)
    first = encode(histories, Clock(now=0.5, lost=0, finished=False), starts=[0, 0])
    histories[0].add(RankState(0, Activity.WAITING, 0, line=4, call="größte"), now=1.5, since=1.25)
    second = encode(histories, Clock(now=2.0, lost=7, finished=True), starts=[0, 1])
    messages = [tmp_path / "first", tmp_path / "second"]
    for path, content in zip(messages, (first, second), strict=True):
        path.write_bytes(content)
    store = json.loads(
        node("--input-type=module", "-e", READ, "--", saved("strip/store", tmp_path), *map(str, messages))
    )
    assert store["whole"] == [True, True]
    assert (store["now"], store["lost"], store["finished"], store["coarse"]) == (2.0, 7, True, 0)
    for history, row in zip(histories, store["rows"], strict=True):
        kept = [
            {
                **{name: getattr(segment, name) for name in ("start", "end", "since", "line", "low", "high", "call")},
                "activity": ACTIVITY_CODES[segment.activity],
                "mixed": segment.mixed,
            }
            for segment in history.segments
        ]
        assert row == {"generation": 0, "segments": kept}


READ_POINTS = """
import { readFileSync } from "node:fs";
const [script, path] = process.argv.slice(1);
const { decode } = await import(`data:text/javascript,${encodeURIComponent(readFileSync(script))}`);
console.log(JSON.stringify(decode(new DataView(Uint8Array.from(readFileSync(path)).buffer))));
"""


def test_browser_reads_the_points_of_a_curve(tmp_path: Path) -> None:
    points = [Point(0, 0.5, 1.0, 1.5), Point(4, -2.0, 0.0, 2.0), Point(8, 1.0, 1.0, 1.0)]
    packed = tmp_path / "points"
    packed.write_bytes(pack_points(points))
    read = json.loads(
        node("--input-type=module", "-e", READ_POINTS, "--", saved("watch/points", tmp_path), str(packed))
    )
    names = {"steps": "step", "lows": "low", "means": "mean", "highs": "high"}
    assert read == {column: [getattr(point, name) for point in points] for column, name in names.items()}
