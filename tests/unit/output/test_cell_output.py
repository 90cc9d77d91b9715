"""Labelled, merged and bounded output, driven with a clock of the test's own."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.output.bench import Bench


def test_the_first_line_is_due_at_once_and_later_ones_are_coalesced() -> None:
    bench = Bench([0])
    assert bench.print(0, "a\n") is True
    assert bench.output.next_due() == pytest.approx(bench.now + 0.012)
    bench.pass_time(0.013)
    assert bench.sink.text() == "[rank 0] a\n"
    for _ in range(100):
        bench.print(0, "b\n")
        bench.pass_time(0.01)
    assert 10 <= len(bench.sink.records) <= 20


def test_lines_of_all_ranks_come_once_even_when_they_come_apart() -> None:
    bench = Bench()
    for rank in (2, 0, 3, 1):
        bench.print(rank, "same\n")
        bench.pass_time(0.015)
    assert bench.end() == ["[ranks 0-3] same"]


def test_a_line_waits_only_so_long_for_the_other_ranks() -> None:
    bench = Bench()
    bench.print(1, "alone\n")
    bench.pass_time(0.2)
    assert bench.sink.text() == "[rank 1] alone\n"


def test_an_extra_line_of_one_rank_does_not_break_the_merging() -> None:
    bench = Bench()
    bench.print(2, "extra\n")
    for rank in range(4):
        bench.print(rank, "one\ntwo\n")
    assert bench.end() == ["[rank 2] extra", "[ranks 0-3] one", "[ranks 0-3] two"]


def test_stderr_stays_stderr() -> None:
    bench = Bench([0])
    bench.print(0, "out\n")
    bench.print(0, "warning\n", "stderr")
    bench.output.flush(final=True)
    assert bench.sink.records == [("stdout", "[rank 0] out\n"), ("stderr", "[rank 0] warning\n")]


def test_identical_results_and_displays_are_shown_once() -> None:
    bench = Bench([0, 1])
    for rank in (0, 1):
        bench.show(rank, {"text/plain": "42"}, "execute_result")
        bench.show(rank, {"text/plain": "Figure", "text/html": "<b>x</b>"})
    bench.output.flush(final=True)
    assert [payload for kind, payload in bench.sink.records if kind == "stdout"] == [
        "[ranks 0-1] 42\n",
        "[ranks 0-1]\n",
    ]
    assert len([kind for kind, _ in bench.sink.records if kind == "display"]) == 1


def test_different_displays_are_labelled_each_in_order_with_the_text() -> None:
    bench = Bench([0, 1])
    for rank in (0, 1):
        bench.print(rank, f"before {rank}\n")
        bench.show(rank, {"text/html": f"<b>{rank}</b>", "text/plain": "b"})
    bench.output.flush(final=True)
    kinds = [(kind, payload if kind == "stdout" else payload[0]["text/html"]) for kind, payload in bench.sink.records]
    for rank in (0, 1):
        positions = [
            next(i for i, (_, p) in enumerate(kinds) if wanted in p) for wanted in (f"before {rank}", f"<b>{rank}<")
        ]
        assert positions == sorted(positions)


def test_updates_reach_the_display_of_their_own_rank() -> None:
    bench = Bench([0, 1])
    for rank in (0, 1):
        bench.show(rank, {"text/html": "<i>1</i>"}, display_id="plot")
    bench.show(1, {"text/html": "<i>2</i>"}, "update_display_data", display_id="plot")
    bench.output.flush(final=True)
    shown = [payload for kind, payload in bench.sink.records if kind == "display"]
    assert len({display_id for _, display_id, _ in shown}) == 2
    assert shown[-1] == ({"text/html": "<i>2</i>"}, shown[1][1], True)


def test_colours_end_with_their_line() -> None:
    bench = Bench([0])
    bench.print(0, "\x1b[31mred\nplain\n")
    assert bench.end() == ["[rank 0] \x1b[31mred\x1b[0m", "[rank 0] plain"]


def test_a_flood_is_bounded_counted_and_its_end_is_kept() -> None:
    bench = Bench(range(4), limit_bytes=100_000)
    for start in range(0, 100_000, 1000):
        for rank in range(4):
            bench.print(
                rank, "".join(f"line {i} of rank {rank} {'x' * 10}\n" for i in range(start, start + 1000)), "stderr"
            )
    bench.output.flush(final=True)
    text = bench.sink.text("stderr")
    assert len(text) < 140_000
    assert "lines" in text
    assert "not shown: a cell shows 0.0954 MiB" in text
    assert "line 99999 of rank 3" in text
    counted = sum(int(n.replace(",", "")) for n in re.findall(r"… ([0-9,]+) lines", text))
    shown = len(re.findall(r"line [0-9]+ of rank", text))
    assert counted + shown == 400_000


def test_what_ranks_left_out_themselves_is_counted_too() -> None:
    bench = Bench([0])
    bench.output.feed(0, "stream", {"name": "stdout", "text": "end\n", "dropped": {"lines": 7, "bytes": 900_000}}, {})
    bench.output.flush(final=True)
    assert "7 lines (0.9 MB) not shown" in bench.sink.text("stderr")


def test_no_more_than_the_servers_rate_goes_out() -> None:
    bench = Bench([0], limit_bytes=10 << 20)
    bench.print(0, ("x" * 99 + "\n") * 20_000)
    sent = []
    for _ in range(6):
        bench.pass_time(1.0)
        sent.append(len(bench.sink.text()))
    steps = [b - a for a, b in itertools.pairwise(sent)]
    assert max(steps) < 500_000
    assert bench.output.drained


def test_quiet_shows_nothing_and_keeps_the_text() -> None:
    bench = Bench([0], quiet=True)
    assert bench.print(0, "kept\n") is False
    bench.output.flush(final=True)
    assert (bench.sink.records, bench.output.text(0), bench.output.next_due()) == ([], "kept\n", None)


def test_a_very_long_line_is_cut() -> None:
    bench = Bench([0])
    bench.print(0, "y" * 200_000 + "\n")
    (line,) = bench.end()
    assert len(line) < 70_000
    assert "line cut" in line


_TEXT = st.text(alphabet=st.sampled_from("ab \t\né漢\x00"), max_size=12)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), _TEXT, st.sampled_from([0.0, 0.005, 0.02, 0.1])), max_size=30))
def test_each_ranks_lines_come_out_whole_and_in_order(chunks: list[tuple[int, str, float]]) -> None:
    bench = Bench()
    printed = dict.fromkeys(range(4), "")
    for rank, text, pause in chunks:
        bench.print(rank, text)
        printed[rank] += text
        bench.pass_time(pause)
    bench.output.flush(final=True)
    shown: dict[int, list[str]] = {rank: [] for rank in range(4)}
    for line in bench.sink.text().split("\n")[:-1]:
        label, _, rest = line.partition("] ")
        for rank in _ranks(label):
            shown[rank].append(rest)
    live = [line.partition("] ") for line in bench.live()]
    for rank in range(4):
        lines = printed[rank].split("\n")
        expected = lines if lines[-1].strip() else lines[:-1]
        kept_live = [rest for label, _, rest in live if rank in _ranks(label)]
        assert sorted(shown[rank] + kept_live) == sorted(expected)
        assert _is_subsequence(shown[rank], expected)


def _ranks(label: str) -> list[int]:
    ranks: list[int] = []
    for part in label.split(" ")[1].split(","):
        low, _, high = part.partition("-")
        ranks += range(int(low), int(high or low) + 1)
    return ranks


def _is_subsequence(part: list[str], whole: list[str]) -> bool:
    rest = iter(whole)
    return all(item in rest for item in part)
