"""Unfinished lines and progress bars: in place while they change, and never twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.cell_output import Bench


def test_unfinished_line_is_held_then_live_then_final() -> None:
    bench = Bench([0])
    bench.print(0, "loading")
    bench.pass_time(0.14)
    assert bench.sink.records == []
    bench.pass_time(0.02)
    assert bench.live() == ["[rank 0] loading"]
    bench.print(0, " ... ")
    bench.pass_time(0.2)
    assert bench.live() == ["[rank 0] loading ..."]
    bench.print(0, "done\nnext\n")
    bench.pass_time(0.5)
    assert bench.live() == []
    assert bench.end() == ["[rank 0] loading ... done", "[rank 0] next"]
    assert bench.lines() == ["[rank 0] loading ... done", "[rank 0] next"]


def test_quickly_completed_line_is_never_shown_unfinished() -> None:
    bench = Bench([0])
    for piece in ("a", "b", "c\n"):
        bench.print(0, piece)
        bench.pass_time(0.05)
    bench.pass_time(1)
    assert bench.sink.records == [("stdout", "[rank 0] abc\n")]


def test_growing_line_is_shown_before_it_ends() -> None:
    bench = Bench([0])
    for _ in range(10):
        bench.print(0, ".")
        bench.pass_time(0.05)
    assert bench.live()[0].startswith("[rank 0] ..")


def test_line_without_newline_is_final_at_the_end() -> None:
    bench = Bench([0, 1])
    for rank in (0, 1):
        bench.print(rank, "no newline")
    assert bench.end() == ["[ranks 0-1] no newline"]
    assert bench.live() == []


def test_unfinished_lines_keep_order_with_later_output() -> None:
    bench = Bench([0])
    for step in range(3):
        bench.print(0, f"step {step} ...")
        bench.pass_time(0.3)
        assert bench.screen()[-1] == f"[rank 0] step {step} ..."
        bench.print(0, " ok\n")
        bench.pass_time(0.3)
    assert bench.end() == [f"[rank 0] step {step} ... ok" for step in range(3)]


def test_progress_bars_update_in_place_one_line_per_rank() -> None:
    bench = Bench([0, 1])
    for step in range(50):
        for rank in (0, 1):
            bench.print(rank, f"\r{step + 1}/50 of rank {rank}", "stderr")
        bench.pass_time(0.1)
    last = ["[rank 0] 50/50 of rank 0", "[rank 1] 50/50 of rank 1"]
    assert bench.screen() == last
    for rank in (0, 1):
        bench.print(rank, "\n", "stderr")
    bench.pass_time(1)
    assert bench.end() == last
    assert bench.lines("stderr") == []
    assert len([1 for kind, payload in bench.sink.records if not payload[2]]) == 1


def test_bar_updates_at_most_ten_times_per_second() -> None:
    bench = Bench([0])
    for step in range(500):
        bench.print(0, f"\r{step}/500", "stderr")
        bench.pass_time(0.01)
    assert 40 <= len(bench.sink.records) <= 51
    bench.pass_time(0.2)
    assert bench.live() == ["[rank 0] 499/500"]


def test_equal_bars_are_merged() -> None:
    bench = Bench()
    for step in range(3):
        for rank in range(4):
            bench.print(rank, f"\rstep {step}", "stderr")
        bench.pass_time(0.2)
    assert bench.screen() == ["[ranks 0-3] step 2"]


def test_bar_without_newline_keeps_its_last_state() -> None:
    bench = Bench([0])
    bench.print(0, "\r1/3", "stderr")
    bench.print(0, "\r2/3", "stderr")
    assert bench.end() == ["[rank 0] 2/3"]
    assert bench.lines("stderr") == []


def test_bar_and_simultaneous_text_keep_their_order() -> None:
    bench = Bench([0])
    bench.print(0, "before\n")
    bench.print(0, "\r1/2\r2/2\n", "stderr")
    bench.print(0, "after\n")
    assert bench.end() == ["[rank 0] before", "[rank 0] 2/2", "[rank 0] after"]


def test_running_bar_stays_in_place() -> None:
    bench = Bench([0])
    bench.print(0, "before\n")
    bench.print(0, "\r1/2\r2/2", "stderr")
    bench.print(0, "after\n")
    bench.pass_time(0.2)
    assert bench.screen() == ["[rank 0] before", "[rank 0] 2/2", "[rank 0] after"]


def test_bar_follows_a_line_delayed_for_other_ranks() -> None:
    bench = Bench([0, 1])
    bench.print(0, "before\n")
    for rank in (0, 1):
        bench.print(rank, "\r1/2\r2/2", "stderr")
    bench.pass_time(0.2)
    assert bench.screen() == ["[rank 0] before", "[ranks 0-1] 2/2"]


def test_alternating_bars_and_lines_keep_their_order() -> None:
    bench = Bench([0, 1])
    for epoch in range(3):
        for step in range(4):
            for rank in (0, 1):
                bench.print(rank, f"\repoch {epoch}: {step}/3", "stderr")
            bench.pass_time(0.1)
        for rank in (0, 1):
            bench.print(rank, "\n", "stderr")
            bench.print(rank, f"loss {1 / (1 + epoch):.2f}\n")
    assert bench.end() == [
        *("[ranks 0-1] epoch 0: 3/3", "[ranks 0-1] loss 1.00"),
        *("[ranks 0-1] epoch 1: 3/3", "[ranks 0-1] loss 0.50"),
        *("[ranks 0-1] epoch 2: 3/3", "[ranks 0-1] loss 0.33"),
    ]


def test_1000_bars_use_few_displays_and_none_is_lost() -> None:
    bench = Bench([0])
    for epoch in range(1000):
        bench.print(0, f"\repoch {epoch}: 1/2\repoch {epoch}: 2/2\n", "stderr")
        bench.print(0, f"loss {epoch}\n")
        bench.pass_time(0.05)
    lines = bench.end()
    assert {f"[rank 0] epoch {epoch}: 2/2" for epoch in range(1000)} | {
        f"[rank 0] loss {epoch}" for epoch in range(1000)
    } == set(lines)
    assert len(lines) == 2000
    assert len([1 for kind, payload in bench.sink.records if kind == "display" and not payload[2]]) <= 110


def test_bar_without_newline_is_separated_from_the_next_line() -> None:
    bench = Bench([0])
    bench.print(0, "\r1/2", "stderr")
    bench.print(0, "\r2/2", "stderr")
    bench.print(0, "a warning\n", "stderr")
    assert bench.end() == ["[rank 0] 2/2", "[rank 0] a warning"]


def test_appended_bar_text_stays_with_the_bar() -> None:
    bench = Bench([0])
    bench.print(0, "\r1/2", "stderr")
    bench.print(0, "\r2/2 [====]", "stderr")
    bench.print(0, " - loss: 0.3\n", "stderr")
    assert bench.end() == ["[rank 0] 2/2 [====] - loss: 0.3"]


def test_erased_bars_and_the_line_that_replaces_them() -> None:
    bench = Bench([0])
    for step in range(3):
        bench.print(0, f"\r\x1b[Kstep {step}")
        bench.pass_time(0.2)
    assert bench.screen() == ["[rank 0] step 2"]
    bench.print(0, "\r\x1b[Kall done\n")
    bench.pass_time(0.5)
    assert bench.end() == ["[rank 0] all done"]
    assert bench.lines() == ["[rank 0] all done"]


def test_spinners_with_backspaces() -> None:
    bench = Bench([0])
    bench.print(0, "working -")
    for frame in "\\|/-\\":
        bench.print(0, f"\b{frame}")
        bench.pass_time(0.2)
    assert bench.screen() == ["[rank 0] working \\"]
    bench.print(0, "\bdone\n")
    assert bench.end() == ["[rank 0] working done"]


def test_empty_lines_are_kept() -> None:
    bench = Bench([0])
    for text in ("a\n\n\n", "b\n", "\n", "c", "\n\n", "\n"):
        bench.print(0, text)
        bench.pass_time(0.07)
    bench.pass_time(0.2)
    assert bench.lines() == [
        "[rank 0] a",
        "[rank 0] ",
        "[rank 0] ",
        "[rank 0] b",
        "[rank 0] ",
        "[rank 0] c",
        *["[rank 0] "] * 2,
    ]


def test_finished_bars_are_lines_without_display_updates() -> None:
    bench = Bench([0, 1], in_place=False)
    for step in range(5):
        for rank in (0, 1):
            bench.print(rank, f"\r{step}/4", "stderr")
        bench.pass_time(0.2)
    bench.print(0, "unfinished")
    bench.pass_time(1)
    assert bench.sink.records == []
    assert bench.end() == ["[ranks 0-1] 4/4", "[rank 0] unfinished"]


def _split(text: str, size: int) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("make", [str.upper, str.lower])
def test_control_sequences_may_be_cut_anywhere(size: int, make: Callable[[str], str]) -> None:
    bench = Bench([0])
    text = (
        make("red")
        + "\r\n\x1b[31mx\x1b[0m\n\n\r 50%|# | 1/2 [00:01<00:01]\r100%|##| 2/2 [00:02<00:00]\n\x1b[A\x1b[?25hok\n"
    )
    for piece in _split(text, size):
        bench.print(0, piece, "stderr")
    whole = Bench([0])
    whole.print(0, text, "stderr")
    assert bench.end() == whole.end()
