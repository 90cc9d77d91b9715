"""Pictures, tables and words of each view, of facts that are made up."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from axon_nb.cluster.inspection.spans import SpanStore
from axon_nb.records.protocol.inspection import NOT_COMPUTED, RecordedPlace, RecordingFacts
from axon_nb.records.spans import Span
from axon_nb.records.training.job import Bar
from axon_nb.records.training.steps import play
from axon_nb.widgets.inside import inside_bundle
from axon_nb.widgets.memory.rows import MemoryRows
from axon_nb.widgets.memory.view import memory_bundle
from axon_nb.widgets.shards import merge_shards, shards_bundle
from axon_nb.widgets.timeline.page import timeline_bundle
from axon_nb.widgets.watch.store import JobStore
from axon_nb.widgets.watch.view import watch_bundle
from tests.support.records.jobs import answers, report, row
from tests.support.records.memory_replies import SIZES, use
from tests.support.records.memory_replies import answers as memory_answers
from tests.support.records.shard_records import split


def _timeline() -> Mapping[str, str]:
    store = SpanStore()
    store.set_groups({"0": range(2)})
    orders = [[(action, rank, m) for action in "FB" for m in range(4)] for rank in range(2)]
    step = play(orders, {"F": 0.01, "B": 0.02})
    for rank in range(2):
        store.add([own._replace(group="0", sequence=1) for own in step if own.rank == rank])
        store.add([Span(rank, "collective", "all_reduce", 10**8 + rank * 10**7, 2 * 10**8, "0", 4096, -1, -1, 1)])
    return timeline_bundle(store.table(), range(2), title="")


def _watch() -> Mapping[str, str]:
    store = JobStore()
    bars = [Bar("epochs", 0, 3, 10, 2.0, False)]
    rows = [row(step, loss=3.0 / (step + 1)) for step in range(20)]
    store.add(answers(report(0, rows, bars=bars), report(1, rows, bars=bars)), 0.0)
    return watch_bundle(store)


def _memory() -> Mapping[str, str]:
    rows = MemoryRows("model")
    rows.update(memory_answers(use(0), use(1), estimated=SIZES))
    return memory_bundle(rows)


def _inside() -> Mapping[str, str]:
    heads = (0, 1)
    places = (
        RecordedPlace(
            "layers.0", (1, 3, 8), 1, (), "", (1.0, 20.0, 3.0), lens=(("<b>", 0.9), ("on", 0.2), ("mat", 0.4))
        ),
        RecordedPlace("layers.0.attention:heads", (1, 3, 2, 4), 1, heads, "heads", (NOT_COMPUTED, 2.0, math.inf)),
        RecordedPlace("attention:attention", (1, 2, 3, 3), 1, heads, "heads", (), bytes(range(0, 252, 14)), (2, 3, 3)),
        RecordedPlace("experts", (3, 8), 2, heads, "features"),
    )
    facts = RecordingFacts(key=1, words=("the", "cat", "sat"), starts=(0, 2), places=places, omitted=("More is cut.",))
    return inside_bundle("seen", {0: facts, 1: facts})


def _shards() -> Mapping[str, str]:
    return shards_bundle("model", merge_shards(split((8, 6), (2, 2), (0, 1))), [])


VIEWS: dict[str, Callable[[], Mapping[str, str]]] = {
    "inside": _inside,
    "memory": _memory,
    "shards": _shards,
    "timeline": _timeline,
    "watch": _watch,
}
"""By name: what makes the bundle."""
