"""Floods are bounded and counted; whatever ranks print, in whatever order, each rank's own text comes out whole."""

from __future__ import annotations

import itertools
import re
import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axon_nb.cluster.output.limits import Rate
from axon_nb.cluster.output.parser import Transcript
from axon_nb.records.protocol.cells import Omitted
from tests.support.cell_output import Bench, ranks_of

MIB = 1 << 20
RAISE = "run `%distributed config output_limit=4MiB` to raise it"

PAUSES = st.sampled_from([0.0, 0.005, 0.02, 0.1, 0.3])
TEXT = st.text(alphabet=st.sampled_from("ab \t\n\né漢\x00"), max_size=12)
ANY_TEXT = st.text(alphabet=st.sampled_from("ab\n\r\b \x1b[;0123AKJmGBEF?h]\ud800"), max_size=20)
LINES = st.lists(st.sampled_from(["same", "loss 1", "loss 2", ""]), max_size=6).map(
    lambda lines: "".join(f"{x}\n" for x in lines)
)


def counted(text: str) -> int:
    """The lines that the notes say are not shown; a note of several ranks counts for each."""
    total = 0
    for label, lines, each in re.findall(r"\[(ranks? [0-9,-]+)\] … ([0-9,]+) lines? \([^)]*\)( each)? not", text):
        low, _, high = label.split(" ")[1].partition("-")
        total += int(lines.replace(",", "")) * ((int(high) - int(low) + 1) if each else 1)
    return total


@pytest.mark.parametrize("flushes", [True, False])
def test_ten_times_the_limit_from_four_ranks_is_bounded(flushes: bool) -> None:
    line = "line {} of rank {} " + "x" * 60
    per_rank = 625_000 // len(line.format(10_000, 0))
    chunks = [
        ("".join(line.format(i, rank) + "\n" for i in range(start, min(start + 1000, per_rank))), rank)
        for start in range(0, per_rank, 1000)
        for rank in range(4)
    ]
    tracemalloc.start()
    bench = Bench(limit_bytes=MIB // 4)
    for text, rank in chunks:
        bench.print(rank, text, "stderr")
        if flushes:
            bench.pass_time(0.01)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    bench.output.flush(final=True)
    shown = bench.sink.text("stderr")
    assert peak < 14 * MIB, "20 MiB without a limit"
    assert MIB / 4 * 0.9 < len(shown) < MIB / 4 * 1.1
    assert f"not shown: the limit is 256 KiB per cell; {RAISE}" in shown
    for rank in range(4):
        assert f"line {per_rank - 1} of rank {rank} " in shown
    assert counted(shown) + len(re.findall("line [0-9]+ of rank", shown)) == 4 * per_rank


def test_memory_of_short_lines_is_bounded() -> None:
    bench = Bench(limit_bytes=100_000)
    text = "x\n" * 20_000
    tracemalloc.start()
    for rank in range(4):
        bench.print(rank, text)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    bench.output.flush(final=True)
    assert peak < 11 * MIB, "15 MiB without a limit"
    shown = bench.sink.text("stdout")
    merged = sum(4 if line.startswith("[ranks 0-3]") else 1 for line in shown.splitlines())
    assert counted(bench.sink.text("stderr")) + merged == 4 * 20_000


def test_equal_floods_count_once_against_the_limit() -> None:
    bench = Bench(limit_bytes=100_000)
    text = "".join(f"line {i}\n" for i in range(4000))
    for rank in range(4):
        bench.print(rank, text)
    lines = bench.end()
    assert lines == [f"[ranks 0-3] line {i}" for i in range(4000)]


def test_equal_notes_and_last_lines_are_merged() -> None:
    bench = Bench(limit_bytes=1000)
    for rank in range(4):
        bench.print(rank, "".join(f"line {i}\n" for i in range(1000)))
    lines = bench.end()
    (note,) = [line for line in lines if "not shown" in line]
    assert note.startswith("[ranks 0-3] … ")
    assert " each not shown: " in note
    assert lines[-40:] == [f"[ranks 0-3] line {i}" for i in range(960, 1000)]
    assert counted(note) == 4 * (1000 - len([line for line in lines if " line " in line]))


def test_omissions_by_ranks_are_counted_and_last_lines_shown() -> None:
    bench = Bench([0])
    bench.print(0, "unfinished")
    bench.print(0, "second last\nlast\n", omitted=Omitted(7, 900_000))
    bench.print(0, "after\n", "stderr")
    assert bench.end() == [
        "[rank 0] unfinished",
        "[rank 0] after",
        f"[rank 0] … 7 lines (900.0 kB) not shown: the limit is 1 MiB per cell; {RAISE} …",
        "[rank 0] second last",
        "[rank 0] last",
    ]
    assert bench.output.text(0) == "unfinished… 7 lines (0.9 MB) omitted by the rank …\nsecond last\nlast\nafter\n"


def test_rank_and_notebook_omission_counts_are_added() -> None:
    bench = Bench([2], limit_bytes=1000)
    bench.print(2, "x\n" * 1000)
    bench.print(2, "y\n" * 40, omitted=Omitted(1000, 2000))
    lines = bench.end()
    shown = len([line for line in lines if line[-1] in "xy"])
    assert counted("\n".join(lines)) == 2040 - shown


def test_flood_of_one_rank_keeps_the_last_lines_of_another() -> None:
    bench = Bench([0, 1], limit_bytes=10_000)
    for _ in range(100):
        bench.print(0, "flood\n" * 1000)
        bench.pass_time(0.01)
    bench.print(1, "important\n", "stderr")
    bench.print(0, "flood\n" * 1000)
    assert "[rank 1] important" in bench.end()


def test_output_stays_within_the_server_rate() -> None:
    bench = Bench([0], limit_bytes=10 * MIB)
    sizes: list[tuple[float, int]] = []
    bench.print(0, ("x" * 99 + "\n") * 20_000)
    for _ in range(1000):
        before = len(bench.sink.text())
        bench.pass_time(0.01)
        sizes.append((bench.now, len(bench.sink.text()) - before))
    for end, _ in sizes:
        assert sum(size for at, size in sizes if end - 0.99 < at <= end) <= 400_000
    assert bench.output.drained
    assert len(bench.lines()) == 20_000
    last = max(at for at, size in sizes if size)
    assert last - 100 < 7, "the rate is used"


def test_end_of_a_cell_stays_within_the_server_rate() -> None:
    bench = Bench([0], limit_bytes=10 * MIB)
    bench.print(0, "".join(f"line {i} {'x' * 90}\n" for i in range(50_000)))
    text = "\n".join(bench.end())
    assert len(text) < 2_100_000
    assert "too much at once for a notebook" in text
    assert "line 49999 " in text
    assert counted(text) + len(re.findall("line [0-9]+ x", text)) == 50_000


def test_script_output_has_no_rate_limit() -> None:
    bench = Bench([0], limit_bytes=10 * MIB, in_place=False)
    bench.print(0, ("x" * 99 + "\n") * 50_000)
    bench.pass_time(0.1)
    assert len(bench.lines()) == 50_000


def test_very_long_line_is_truncated_with_a_note() -> None:
    bench = Bench([0])
    bench.print(0, "y" * 100_000 + "\nnext\n")
    for _ in range(200):
        bench.print(0, "z" * 1000)
    bench.print(0, "\n")
    first, second, third = bench.end()
    assert first == "[rank 0] " + "y" * 65536 + " … 34,464 more characters of this line not shown …"
    assert second == "[rank 0] next"
    assert third == "[rank 0] " + "z" * 65536 + " … 134,464 more characters of this line not shown …"


def test_endless_bars_use_bounded_space() -> None:
    bench = Bench([0], limit_bytes=20_000)
    tracemalloc.start()
    for start in range(0, 10_000, 1000):
        bench.print(0, "".join(f"bar {i}: 1\rbar {i}: 2\n" for i in range(start, start + 1000)), "stderr")
        bench.pass_time(0.05)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    lines = bench.end()
    assert peak < 4 * MIB
    assert len("\n".join(lines)) < 30_000
    assert counted("\n".join(lines)) + len([line for line in lines if ": 2" in line]) == 10_000


@pytest.mark.parametrize(
    "piece", ["1\r2\n", "\x1b[31mred\x1b[K\n", "\x1b[A\n", "\b\n", "\r", "\n", "\r\n", "x\r\x1b[K"]
)
def test_every_kind_of_text_is_processed_fast(piece: str) -> None:
    bench = Bench([0])
    began = time.process_time()
    bench.print(0, piece * 40_000)
    bench.output.flush(final=True)
    assert time.process_time() - began < 60


def test_note_states_the_limit_of_the_cell() -> None:
    bench = Bench([0], limit_bytes=2 * MIB, in_place=False)
    bench.print(0, ("x" * 99 + "\n") * 25_000)
    assert "the limit is 2 MiB per cell; run `%distributed config output_limit=8MiB`" in "\n".join(bench.end())


def test_rate_applies_to_any_one_second_window() -> None:
    rate = Rate(100)
    sent = []
    for i in range(1000):
        now = i / 100
        if rate.allows(30, now):
            rate.take(30, now)
            sent.append(now)
    for first, fourth in zip(sent, sent[3:], strict=False):
        assert fourth - first >= 1.0
    assert len(sent) >= 30
    rate = Rate(100)
    assert rate.allows(1000, 0.0), "larger than the rate itself: goes when nothing else did"
    rate.take(1000, 0.0)
    assert not rate.allows(1, 0.5)


def test_transcript_keeps_both_ends() -> None:
    transcript = Transcript(1000)
    for i in range(1000):
        transcript.add(f"line {i}\n")
    text = transcript.text()
    assert len(text) < 1100
    assert text.startswith("line 0\nline 1\n")
    assert text.endswith("line 998\nline 999\n")
    (omitted,) = re.findall(r"\n… ([0-9,]+) characters omitted …\n", text)
    whole = sum(len(f"line {i}\n") for i in range(1000))
    assert int(omitted.replace(",", "")) == whole - (len(text) - len(f"\n… {omitted} characters omitted …\n"))


def test_transcript_under_its_limit_is_exact() -> None:
    transcript = Transcript(5000)
    pieces = [str(i) * (i % 7) for i in range(200)]
    for piece in pieces:
        transcript.add(piece)
    assert transcript.text() == "".join(pieces)


def test_flooded_transcript_of_one_chunk() -> None:
    transcript = Transcript(1000)
    transcript.add("a" * 10_000 + "end")
    assert transcript.text().endswith("aend")
    assert len(transcript.text()) < 1100


def test_omission_note_precedes_the_last_lines() -> None:
    bench = Bench([0], limit_bytes=1000)
    bench.print(0, "".join(f"line {i}\n" for i in range(500)))
    bench.pass_time(1)
    bench.print(0, "".join(f"line {i}\n" for i in range(500, 1000)))
    lines = bench.end()
    numbers = [int(line.rsplit(" ", 1)[1]) for line in lines if "not shown" not in line]
    gaps = [(a, b) for a, b in itertools.pairwise(numbers) if b != a + 1]
    assert len(gaps) == 1, "one gap, and the order is kept"
    note = next(i for i, line in enumerate(lines) if "not shown" in line)
    assert numbers[note:] == list(range(960, 1000))


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
