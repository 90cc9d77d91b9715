"""Whose times a timeline shows: the host's, the GPU's, or those of a launch."""

from __future__ import annotations

from axon_nb.cluster.inspection.spans import SpanStore
from axon_nb.records.spans import Span
from axon_nb.widgets.timeline.content import page_facts, summarize
from axon_nb.widgets.timeline.facts import timeline_facts
from axon_nb.widgets.timeline.page import timeline_bundle

MS = 1_000_000


def test_times_of_a_launch_are_named() -> None:
    store = SpanStore()
    store.add(
        Span(rank, "forward", "GPT", 0, 9 * MS, clock=clock)
        for rank, clock in enumerate(("launch", "gpu", "launch", ""))
    )
    text = "Ranks 0,2: some spans show when work was launched, as no event of the GPU was recorded."
    assert page_facts(summarize(store.table()), [0])["facts"]["notes"] == [text]
    bundle = timeline_bundle(store.table(), range(4), title="")
    assert text in bundle["text/plain"]
    assert text in bundle["text/html"]
    assert store.table().to_frame()["clock"].tolist() == ["launch", "gpu", "launch", "host"]


def test_collectives_on_gpus_are_compared_by_their_lengths() -> None:
    """By the starts, which are estimates, rank 1 would be late; it was the first, and waited longest."""
    store = SpanStore()
    store.set_groups({"0": [0, 1]})
    times = ((10, 12), (14, 20))
    store.add(
        Span(rank, "collective", "all_reduce", start * MS, end * MS, "0", sequence=1, clock="gpu")
        for rank, (start, end) in enumerate(times)
    )
    table = store.table()
    assert (table.columns["late"] // MS).tolist() == [0, 4]
    assert table.columns["by"].tolist() == [0, 0]
    assert timeline_facts(table).clock_notes == [
        "Ranks 0-1: the lengths of NCCL's operations are measured, their starts are estimated."
    ]


def test_what_was_slowed_on_purpose_is_in_heading_and_notes() -> None:
    store = SpanStore()
    store.add(
        [
            Span(0, "cell", "In [3]", 0, 5 * MS, "slowed: all links: 100 Mbit/s"),
            Span(0, "cell", "In [4]", 6 * MS, 9 * MS),
        ]
    )
    assert timeline_facts(store.table()).clock_notes == ["Slowed: all links: 100 Mbit/s."]
    bundle = timeline_bundle(store.table(), [0], title="")
    assert bundle["text/plain"].startswith("Timeline, slowed: all links: 100 Mbit/s, 1 rank")
