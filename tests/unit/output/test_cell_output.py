"""Lines of several ranks: labelled, merged, in time and in order; and the line that says who is waited for."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from axon_nb.cluster.output import CellOutput, RecordingSink
from axon_nb.cluster.output.sinks import WaitNotice
from tests.support.cell_output import Bench


def test_first_line_is_due_at_once_and_later_ones_are_coalesced() -> None:
    bench = Bench([0])
    assert bench.print(0, "a\n") is True
    assert bench.output.next_due() == pytest.approx(bench.now + 0.012)
    bench.pass_time(0.013)
    assert bench.sink.text() == "[rank 0] a\n"
    for _ in range(100):
        bench.print(0, "b\n")
        bench.pass_time(0.01)
    assert 10 <= len(bench.sink.records) <= 17


def test_later_flush_is_not_announced() -> None:
    bench = Bench([0, 1])
    assert bench.print(0, "a\n") is True
    assert bench.print(1, "a\n") is False
    assert bench.print(1, "b\n") is False


def test_nothing_is_due_when_nothing_is_pending() -> None:
    bench = Bench()
    assert bench.output.next_due() is None
    bench.print(0, "a\n")
    bench.pass_time(1)
    assert bench.output.next_due() is None
    bench.print(0, "\r 10%", "stderr")
    bench.print(0, "\r 20%", "stderr")
    bench.pass_time(1)
    assert bench.output.next_due() is None, "a bar that stands still keeps nobody awake"


def test_equal_lines_of_all_ranks_merge_despite_delays() -> None:
    bench = Bench()
    for rank in (2, 0, 3, 1):
        bench.print(rank, "same\n")
        bench.pass_time(0.015)
    assert bench.end() == ["[ranks 0-3] same"]


def test_line_waits_one_window_for_the_other_ranks() -> None:
    bench = Bench()
    bench.print(1, "alone\n")
    bench.pass_time(0.05)
    assert bench.sink.text() == ""
    bench.pass_time(0.035)
    assert bench.sink.text() == "[rank 1] alone\n"


def test_busy_printing_rank_does_not_delay_waiting_lines() -> None:
    bench = Bench([0, 1, 2])
    bench.print(2, "waits\n")
    for step in range(10):
        bench.print(0, f"step {step}\n")
        bench.pass_time(0.02)
    assert "[rank 2] waits\n" in bench.sink.text()


def test_due_line_merges_with_its_equal_behind_newer_lines() -> None:
    bench = Bench([0, 1, 2])
    bench.print(1, "same\n")
    bench.pass_time(0.05)
    bench.print(0, "before\nsame\n")
    bench.pass_time(0.04)
    assert bench.sink.text() == "[rank 0] before\n[ranks 0-1] same\n"


def test_different_lines_of_all_ranks_are_shown_after_one_window() -> None:
    bench = Bench()
    for rank in range(4):
        bench.print(rank, f"rank {rank}\n")
    bench.pass_time(0.08)
    assert bench.lines() == [f"[rank {rank}] rank {rank}" for rank in range(4)]


def test_finished_rank_is_not_waited_for() -> None:
    bench = Bench()
    for rank in (0, 1, 2):
        bench.print(rank, "same\n")
    bench.output.rank_done(3)
    bench.pass_time(0.013)
    assert bench.lines() == ["[ranks 0-2] same"]


def test_no_line_waits_once_all_ranks_finished() -> None:
    bench = Bench([0, 1])
    for rank in (0, 1):
        bench.print(rank, "first\n")
    bench.pass_time(0.013)
    for rank in (0, 1):
        bench.print(rank, "last, without newline")
        bench.output.rank_done(rank)
    assert bench.output.next_due() == bench.now
    bench.output.flush()
    assert bench.output.drained
    assert bench.lines() == ["[ranks 0-1] first", "[ranks 0-1] last, without newline"]


def test_extra_line_of_one_rank_does_not_break_merging() -> None:
    bench = Bench()
    bench.print(2, "extra\n")
    for rank in range(4):
        bench.print(rank, "one\ntwo\n")
    assert bench.end() == ["[rank 2] extra", "[ranks 0-3] one", "[ranks 0-3] two"]


def test_reordered_lines_keep_the_order_per_rank() -> None:
    bench = Bench([0, 1])
    bench.print(0, "a\nb\n")
    bench.print(1, "b\na\n")
    lines = bench.end()
    assert [line for line in lines if "0" in line.split("]")[0]] in (
        ["[rank 0] a", "[ranks 0-1] b"],
        ["[ranks 0-1] a", "[rank 0] b"],
    )
    assert len(lines) == 3


def test_ranks_in_a_label_are_compact() -> None:
    bench = Bench(range(8))
    for rank in (0, 2, 3, 7):
        bench.print(rank, "x\n")
    assert bench.end() == ["[ranks 0,2-3,7] x"]


def test_thousands_of_pending_lines_stay_cheap() -> None:
    bench = Bench(range(8), limit_bytes=64 << 20)
    began = time.process_time()
    for rank in range(8):
        bench.print(rank, "".join(f"line {i if i % 7 else f'{i} of {rank}'}\n" for i in range(5000)))
    bench.output.flush(final=True)
    assert time.process_time() - began < 60  # each line against each other would take minutes
    assert sum(line.startswith("[ranks 0-7]") for line in bench.lines()) == 5000 - 715


def test_stderr_stays_stderr_in_order_with_stdout() -> None:
    bench = Bench([0])
    bench.print(0, "out\n")
    bench.print(0, "warning\n", "stderr")
    bench.print(0, "out again\n")
    bench.output.flush(final=True)
    assert bench.sink.records == [
        ("stdout", "[rank 0] out\n"),
        ("stderr", "[rank 0] warning\n"),
        ("stdout", "[rank 0] out again\n"),
    ]


def test_1000_stream_switches_give_few_messages() -> None:
    bench = Bench([0])
    for i in range(1000):
        bench.print(0, f"out {i}\n")
        bench.print(0, f"err {i}\n", "stderr")
    bench.output.flush(final=True)
    assert len(bench.sink.records) <= 20
    for name, word in (("stdout", "out"), ("stderr", "err")):
        assert bench.lines(name) == [f"[rank 0] {word} {i}" for i in range(1000)]


def test_colours_end_with_their_line() -> None:
    bench = Bench([0])
    bench.print(0, "\x1b[31mred\nplain\n\x1b[1mbold\x1b[0m\n")
    assert bench.end() == ["[rank 0] \x1b[31mred\x1b[0m", "[rank 0] plain", "[rank 0] \x1b[1mbold\x1b[0m"]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", []),
        ("\n", [""]),
        ("dos\r\nline ends\r\n", ["dos", "line ends"]),
        ("tab\tand 漢字 👩‍🚀\n", ["tab\tand 漢字 👩‍🚀"]),
        ("\x1b[A\x1b[Aup\n", ["up"]),
        ("half \ud83d of a pair\n", ["half ? of a pair"]),
        ("nul \x00 bell \x07\n", ["nul \x00 bell \x07"]),
        ("\x1b]8;;http://a\x1b\\link\x1b]8;;\x1b\\ \x1b[?25lhidden\n", ["link hidden"]),
        ("\x1b[2J\x1b[Hcleared\n", ["cleared"]),
    ],
)
def test_malformed_text_is_accepted(text: str, lines: list[str]) -> None:
    bench = Bench([0])
    bench.print(0, text)
    assert bench.end() == [f"[rank 0] {line}" for line in lines]


def test_other_messages_are_ignored() -> None:
    bench = Bench([0])
    assert bench.output.feed(0, "error", {"ename": "E", "evalue": "", "traceback": []}, {}) is False
    assert bench.output.feed(0, "status", {"execution_state": "idle"}, {}) is False
    assert bench.output.feed(7, "stream", {"name": "stdout", "text": "not in this cell\n"}, {}) is False
    assert bench.output.feed(0, "display_data", {"data": None}, {}) is False
    assert bench.end() == []


def test_quiet_shows_nothing_and_keeps_the_text() -> None:
    bench = Bench([0], quiet=True)
    assert bench.print(0, "kept\n") is False
    assert bench.print(0, "\r1/2\r2/2\n", "stderr") is False
    assert bench.show(0, {"text/plain": "42"}, "execute_result") is False
    bench.clear(0)
    bench.print(0, "no newline")
    assert bench.output.text(0) == "kept\n2/2\nno newline"
    bench.output.rank_done(0)
    assert (bench.end(), bench.sink.records, bench.output.next_due()) == ([], [], None)
    assert bench.output.text(0) == "kept\n2/2\nno newline"
    assert bench.output.drained


def test_text_per_rank_is_kept_when_shown() -> None:
    bench = Bench([0, 1])
    bench.print(0, "zero\n")
    bench.print(1, "one\nand a half")
    assert (bench.output.text(0), bench.output.text(1)) == ("zero\n", "one\nand a half")
    bench.end()
    assert (bench.output.text(0), bench.output.text(1)) == ("zero\n", "one\nand a half")


def test_feeding_from_another_thread_loses_nothing() -> None:
    sink = RecordingSink()
    output = CellOutput([0, 1, 2, 3], sink)

    def feed(rank: int) -> None:
        for i in range(500):
            output.feed(rank, "stream", {"name": "stdout", "text": f"{rank}: {i}\n"}, {})
        output.rank_done(rank)

    threads = [threading.Thread(target=feed, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or not output.drained:
        output.flush()
    output.flush(final=True)
    for rank in range(4):
        own = [line for line in sink.text().splitlines() if line.startswith(f"[rank {rank}]")]
        assert own == [f"[rank {rank}] {rank}: {i}" for i in range(500)]


def test_small_cell_has_little_overhead() -> None:
    def one_cell() -> float:
        began = time.process_time()
        output = CellOutput(range(4), RecordingSink())
        for rank in range(4):
            output.feed(rank, "stream", {"name": "stdout", "text": "hello\n"}, {})
            output.rank_done(rank)
        output.flush()
        output.flush(final=True)
        return time.process_time() - began

    assert min(one_cell() for _ in range(50)) < 0.05


class Page:
    """Keeps what is shown, as a notebook does."""

    def __init__(self, *, in_place: bool) -> None:
        self.in_place = in_place
        self.displays: dict[str | None, str] = {}
        self.updates = 0
        self.printed: list[str] = []

    def stream(self, name: str, text: str) -> None:
        self.printed.append(text)

    def display(self, data: dict[str, Any], metadata: dict[str, Any], *, display_id: str | None, update: bool) -> None:
        assert update == (display_id in self.displays)
        self.displays[display_id] = data["text/plain"]
        self.updates += 1

    def clear(self, *, wait: bool) -> None:
        self.displays.clear()


def test_wait_notice_updates_once_per_second_and_is_cleared() -> None:
    page = Page(in_place=True)
    notice = WaitNotice(page)
    for tenth in range(31):
        notice.show(f"slow for {tenth}", tenth / 10)
    assert list(page.displays.values()) == ["slow for 30"]
    assert page.updates == 4
    notice.show("", 3.2)
    assert list(page.displays.values()) == [""]
    notice.hide()
    assert page.updates == 5


def test_new_waits_move_the_notice_down_a_bounded_number_of_times() -> None:
    page = Page(in_place=True)
    notice = WaitNotice(page)
    for second in range(40):
        notice.show("slow", float(second))
        notice.hide()
    assert len(page.displays) == 10
    assert set(page.displays.values()) == {""}


def test_terminal_gets_few_lines() -> None:
    page = Page(in_place=False)
    notice = WaitNotice(page)
    for second in range(301):
        notice.show(f"slow for {second} s", float(second))
    notice.hide()
    assert page.printed == ["slow for 0 s\n", "slow for 30 s\n", "slow for 300 s\n"]
    assert not page.displays
