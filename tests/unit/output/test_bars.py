"""Rows that change: progress bars and lines without an end yet."""

from __future__ import annotations

import io

from tqdm import tqdm

from tests.unit.output.bench import Bench


def test_an_unfinished_line_is_shown_live_and_is_whole_in_the_end() -> None:
    bench = Bench([0])
    bench.print(0, "loading")
    bench.pass_time(0.5)
    assert bench.live() == ["[rank 0] loading"]
    bench.print(0, " ... done\nnext\n")
    bench.pass_time(0.5)
    assert bench.live() == ["[rank 0] loading ... done"]
    assert bench.end() == ["[rank 0] next"]


def test_a_short_line_without_newline_is_an_ordinary_line_at_the_end() -> None:
    bench = Bench([0, 1])
    bench.print(0, "no newline")
    bench.print(1, "no newline")
    assert bench.end() == ["[ranks 0-1] no newline"]
    assert bench.live() == []


def test_progress_bars_stay_in_place_one_line_a_rank() -> None:
    bench = Bench([0, 1])
    for step in range(50):
        for rank in (0, 1):
            bench.print(rank, f"\r{step + 1}/50 of rank {rank}", "stderr")
        bench.pass_time(0.1)
    assert bench.live() == ["[rank 0] 50/50 of rank 0", "[rank 1] 50/50 of rank 1"]
    for rank in (0, 1):
        bench.print(rank, "\n", "stderr")
    assert bench.end() == []
    assert bench.live() == ["[rank 0] 50/50 of rank 0", "[rank 1] 50/50 of rank 1"]


def test_equal_bars_are_merged() -> None:
    bench = Bench()
    for step in range(3):
        for rank in range(4):
            bench.print(rank, f"\rstep {step}", "stderr")
        bench.pass_time(0.1)
    assert bench.live() == ["[ranks 0-3] step 2"]


def test_real_tqdm_with_lines_between() -> None:
    bench, text = Bench([0]), io.StringIO()
    sent = 0
    for i in tqdm(range(5), file=text, mininterval=0, ncols=40, desc="epoch"):
        if i == 2:
            tqdm.write("a line between", file=text)
        bench.print(0, text.getvalue()[sent:], "stderr")
        sent = len(text.getvalue())
        bench.pass_time(0.2)
    bench.print(0, text.getvalue()[sent:], "stderr")
    bench.output.flush(final=True)
    assert bench.sink.text("stderr").splitlines() == ["[rank 0] a line between"]
    assert len(bench.live()) == 1
    assert "epoch: 100%" in bench.live()[0]


def test_real_nested_tqdm() -> None:
    bench, text = Bench([0]), io.StringIO()
    sent = 0
    for _ in tqdm(range(2), file=text, mininterval=0, ncols=40, desc="outer", position=0):
        for _ in tqdm(range(3), file=text, mininterval=0, ncols=40, desc="inner", position=1, leave=False):
            bench.print(0, text.getvalue()[sent:], "stderr")
            sent = len(text.getvalue())
            bench.pass_time(0.05)
    bench.print(0, text.getvalue()[sent:], "stderr")
    bench.output.flush(final=True)
    assert bench.sink.text("stderr") == ""
    assert [line.split("%")[0] for line in bench.live()] == ["[rank 0] outer: 100"]
