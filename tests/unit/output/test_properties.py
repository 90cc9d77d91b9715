"""Whatever ranks print, in whatever pieces and order: each rank's own text comes out whole and in order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cell_output import Bench, ranks_of

PAUSES = st.sampled_from([0.0, 0.005, 0.02, 0.1, 0.3])
TEXT = st.text(alphabet=st.sampled_from("ab \t\n\né漢\x00"), max_size=12)
ANY_TEXT = st.text(alphabet=st.sampled_from("ab\n\r\b \x1b[;0123AKJmGBEF?h]\ud800"), max_size=20)
LINES = st.lists(st.sampled_from(["same", "loss 1", "loss 2", ""]), max_size=6).map(
    lambda lines: "".join(f"{x}\n" for x in lines)
)


def printed_lines(text: str) -> list[str]:
    lines = text.split("\n")
    return lines if lines[-1] else lines[:-1]


def shown_by_rank(lines: list[str], num_ranks: int = 4) -> dict[int, list[str]]:
    shown: dict[int, list[str]] = {rank: [] for rank in range(num_ranks)}
    for line in lines:
        ranks, text = ranks_of(line)
        assert ranks == sorted(set(ranks))
        for rank in ranks:
            shown[rank].append(text)
    return shown


@pytest.mark.parametrize("in_place", [True, False])
@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.one_of(TEXT, LINES), PAUSES), max_size=40), st.sets(st.integers(0, 3)))
def test_lines_of_each_rank_are_whole_and_in_order(
    in_place: bool, chunks: list[tuple[int, str, float]], done: set[int]
) -> None:
    bench = Bench(in_place=in_place)
    printed = dict.fromkeys(range(4), "")
    for rank, text, pause in chunks:
        bench.print(rank, text)
        printed[rank] += text
        bench.pass_time(pause)
    for rank in done:
        bench.output.rank_done(rank)
    bench.pass_time(0.02)
    bench.output.flush(final=True)
    assert shown_by_rank(bench.sink.text().split("\n")[:-1]) == {
        rank: printed_lines(text) for rank, text in printed.items()
    }
    assert bench.live() == []
    assert {rank: bench.output.text(rank) for rank in range(4)} == printed


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), LINES, PAUSES), max_size=40))
def test_equal_output_within_one_flush_is_shown_once(chunks: list[tuple[int, str, float]]) -> None:
    together = "".join(text for _, text, _ in chunks)
    bench = Bench()
    for rank in range(4):
        bench.print(rank, together)
    assert bench.end() == [f"[ranks 0-3] {line}" for line in printed_lines(together)]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.sampled_from(["stdout", "stderr", "stderr", "display", "update", "clear", "wait"]),
            ANY_TEXT,
            PAUSES,
        ),
        max_size=40,
    ),
    st.sampled_from([300, 1 << 20]),
)
def test_arbitrary_messages_are_accepted(chunks: list[tuple[int, str, str, float]], limit: int) -> None:
    bench = Bench(range(3), limit_bytes=limit)
    for rank, kind, text, pause in chunks:
        if kind in ("stdout", "stderr"):
            bench.print(rank, text, kind)
        elif kind == "display":
            bench.show(rank, {"text/plain": text}, **({"display_id": "d"} if "a" in text else {}))
        elif kind == "update":
            bench.show(rank, {"text/html": text}, "update_display_data", display_id="d")
        else:
            bench.clear(rank, wait=kind == "wait")
        bench.pass_time(pause)
    bench.output.flush(final=True)
    assert bench.output.drained
    assert bench.output.next_due() is None
    for kind, payload in bench.sink.records:
        if kind in ("stdout", "stderr"):
            payload.encode()
            assert payload.endswith("\n")
            for line in payload[:-1].split("\n"):
                assert line.startswith(("[rank", "         "))
                assert "\r" not in line
                assert "\b" not in line
    before = len(bench.sink.records)
    bench.output.flush(final=True)
    assert len(bench.sink.records) == before


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30), st.booleans(), PAUSES), max_size=8))
def test_each_finished_bar_is_shown_once(bars: list[tuple[int, bool, float]]) -> None:
    bench = Bench([0])
    expected = []
    for number, (count, pieces, pause) in enumerate(bars):
        steps = [f"\rbar {number}: {step}/{count}" for step in range(count + 1)]
        for text in [*steps, "\n"] if pieces else ["".join(steps) + "\n"]:
            bench.print(0, text, "stderr")
            bench.pass_time(pause)
        bench.print(0, f"line {number}\n", "stderr" if pieces else "stdout")
        expected += [f"[rank 0] bar {number}: {count}/{count}", f"[rank 0] line {number}"]
    assert sorted(bench.end()) == sorted(expected)
