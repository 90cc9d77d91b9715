"""Pipelines' last steps out of a store that holds the spans of very many."""

from __future__ import annotations

import json

from axon_nb.cluster.inspection.spans import SpanStore
from axon_nb.records.spans import Span
from axon_nb.records.training.steps import play
from axon_nb.widgets.timeline.content import page_facts, pipeline_steps, summarize
from axon_nb.widgets.timeline.page import timeline_bundle

STEP_NS = 1_000_000_000


def gpipe(num_ranks: int, num_microbatches: int, *, group: str, start_ns: int, first_rank: int = 0) -> list[list[Span]]:
    """One step; a list for each rank."""
    numbers, ranks = range(num_microbatches), range(first_rank, first_rank + num_ranks)
    orders = [[(action, r, m) for action in "FB" for m in numbers] for r in range(num_ranks)]
    spans = [
        own._replace(start_ns=own.start_ns + start_ns, end_ns=own.end_ns + start_ns, group=group, sequence=start_ns + 1)
        for own in play(orders, {"F": 1e-4, "B": 1e-4}, ranks=list(ranks))
    ]
    return [[span for span in spans if span.rank == rank] for rank in ranks]


def test_newest_of_many_pipelines_are_shown() -> None:
    store = SpanStore()
    for number in range(1, 41):
        store.set_groups({str(number): [0, 1]})
        for own in gpipe(2, 4, group=str(number), start_ns=number * STEP_NS):
            store.add(own)
    store.set_groups({"0": range(4)})
    for own in gpipe(4, 4, group="0", start_ns=50 * STEP_NS):
        store.add(own)
    found = pipeline_steps(store.table())
    assert [step.group for step in found] == ["0", *(str(number) for number in range(40, 0, -1))]
    words = timeline_bundle(store.table(), range(4), title="")["text/plain"]
    assert "pipeline of ranks 0-3, 4 stages, 4 microbatches" in words
    assert "37 older pipelines are left out." in words


def test_ranks_replying_in_turn_are_all_analysed() -> None:
    store = SpanStore()
    store.set_groups({"0": range(4), "1": range(4)})
    by_rank: list[list[Span]] = [[], [], [], []]
    for number in range(100):
        for rank, own in enumerate(gpipe(4, 16, group="0", start_ns=number * STEP_NS)):
            by_rank[rank] += own
    for rank, own in enumerate(gpipe(4, 400, group="1", start_ns=200 * STEP_NS)):
        by_rank[rank] += own
    for own in by_rank:
        store.add(own[7:])
    found = {step.group: step for step in pipeline_steps(store.table())}
    assert min(span.start_ns for span in found["0"].measured) == 99 * STEP_NS
    assert len(found["1"].measured) == 4 * 2 * 400  # more than are looked at first


def test_facts_of_large_pipelines_fit_into_one_message() -> None:
    store = SpanStore()
    for number in range(4):
        store.set_groups({str(number): range(16)})
        for own in gpipe(16, 64, group=str(number), start_ns=number * STEP_NS):
            store.add(own)
    facts = page_facts(summarize(store.table()), range(16))
    assert len(json.dumps(facts, separators=(",", ":"))) < 45_000
    assert [step["omitted"] for step in facts["pipelines"]] == [16 * 64 * 2 - 125] * 4
    shown = facts["pipelines"][0]["rows"][0]["boxes"]
    assert [box[1] for box in shown] == sorted(box[1] for box in shown)
