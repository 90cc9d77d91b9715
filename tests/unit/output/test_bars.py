"""Unfinished lines and progress bars, tqdm's among them: in place while they change, and never twice."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tqdm import tqdm

from tests.support.cell_output import Bench, ranks_of


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


class Terminal(io.StringIO):
    """What a rank's stderr is to tqdm: passes on to the bench what was written since.

    Each flush is a message of its own, as tqdm's flushes are.
    """

    def __init__(self, bench: Bench, rank: int = 0) -> None:
        super().__init__()
        self.bench = bench
        self.rank = rank
        self._sent = 0

    def flush(self) -> None:
        """Send what was written."""
        self.send()

    def send(self, seconds: float = 0.0) -> None:
        """Send what was written, and let time go on."""
        text = self.getvalue()[self._sent :]
        self._sent += len(text)
        if text:
            self.bench.print(self.rank, text, "stderr")
        self.bench.pass_time(seconds)


def bar(terminal: Terminal, count: int, **options: Any) -> Iterator[int]:
    yield from tqdm(range(count), file=terminal, mininterval=0, ncols=50, **options)


def percents(lines: list[str]) -> list[str]:
    """Bars as far as their percentage, the rest differs from run to run."""
    return [line.split("%")[0] + "%" if "%" in line else line for line in lines]


@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.1, 0.4])
def test_real_nested_tqdm(seconds: float) -> None:
    bench = Bench([0])
    terminal = Terminal(bench)
    for _ in bar(terminal, 2, desc="outer", position=0):
        for _ in bar(terminal, 3, desc="inner", position=1, leave=False):
            terminal.send(seconds)
            if seconds > 0.3:
                # A bar that has only just begun may be missing for as long as an unfinished line is held.
                assert [line.split(":")[0] for line in bench.screen()] == ["[rank 0] outer", "[rank 0] inner"]
    terminal.send()
    assert percents(bench.end()) == ["[rank 0] outer: 100%"]
    assert bench.lines("stderr") == []


def test_real_nested_tqdm_that_leaves_its_bars() -> None:
    bench = Bench([0])
    terminal = Terminal(bench)
    for epoch in bar(terminal, 2, desc="outer"):
        for _ in bar(terminal, 3, desc=f"inner {epoch}"):
            terminal.send(0.1)
    terminal.send(1)
    assert sorted(percents(bench.end())) == [
        "[rank 0] inner 0: 100%",
        "[rank 0] inner 1: 100%",
        "[rank 0] outer: 100%",
    ]
    assert bench.lines("stderr") == []


@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.07, 0.3])
@pytest.mark.parametrize("spread", [False, True])
def test_real_tqdm_of_four_ranks(spread: bool, seconds: float) -> None:
    bench = Bench()
    terminals = [Terminal(bench, rank) for rank in range(4)]
    bars = [bar(terminal, 10, desc="steps", position=rank if spread else 0) for rank, terminal in enumerate(terminals)]
    for i, _ in enumerate(zip(*bars, strict=True)):
        for terminal in terminals:
            terminal.send()
        bench.pass_time(seconds)
        if i and seconds > 0.2:
            assert sorted(rank for line in bench.screen() for rank in ranks_of(line)[0]) == [0, 1, 2, 3]
    for terminal in terminals:
        terminal.send()
    shown = [(rank, line) for line in percents(bench.end()) for rank in ranks_of(line)[0]]
    assert sorted(rank for rank, _ in shown) == [0, 1, 2, 3]
    assert all("steps: 100%" in line for _, line in shown)
    assert bench.lines("stderr") == []
    assert bench.lines() == []


@pytest.mark.parametrize("offset", [0.0, 0.004, 0.013, 0.03])
def test_straggling_bars_end_in_rank_order(offset: float) -> None:
    bench = Bench([0, 1, 2])
    for epoch in range(3):
        for step in range(8):
            for rank in (2, 0, 1):
                row = f"\repoch {epoch}: {step * 100 // 7}%|#| {step}/7 [00:0{rank}<00:00, {9 + 3 * rank}it/s]"
                bench.print(rank, row, "stderr")
                if step == 7:
                    bench.pass_time(offset)
                    bench.print(rank, "\n", "stderr")
                    bench.print(rank, f"loss {epoch}\n")
                    bench.print(
                        rank, f"\repoch {epoch + 1}: 0%|#| 0/7 [00:0{rank}<00:00, {9 + 3 * rank}it/s]", "stderr"
                    )
            bench.pass_time(0.031)
    expected = [
        line
        for epoch in range(3)
        for line in [*(f"[rank {rank}] epoch {epoch}: 100%" for rank in range(3)), f"[ranks 0-2] loss {epoch}"]
    ]
    bench.pass_time(0.3)
    assert percents(bench.end()) == [*expected, *(f"[rank {rank}] epoch 3: 0%" for rank in range(3))]


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("seconds", [0.0, 0.03, 0.07, 0.2])
def test_real_tqdm_epoch_after_epoch_with_lines_between(spread: bool, seconds: float) -> None:
    bench = Bench([0, 1, 2])
    terminals = [Terminal(bench, rank) for rank in range(3)]
    for epoch in range(3):
        options: dict[str, Any] = {
            "desc": f"epoch {epoch}",
            "bar_format": "{desc}: {percentage:.0f}%|{bar}| {n}/{total} [00:00<00:00, 9it/s]",
        }
        bars = [bar(t, 7, position=rank if spread else 0, **options) for rank, t in enumerate(terminals)]
        for step, _ in enumerate(zip(*bars, strict=True)):
            bench.pass_time(seconds)
            if step == 3 and epoch == 1:
                tqdm.write("written", file=terminals[0])
        for rank in range(3):
            terminals[rank].send()
            bench.print(rank, f"loss {epoch}\n")
    for rank in range(3):
        bench.print(rank, "saved\n", "stderr")
    lines = percents(bench.end())
    lines.remove("[rank 0] written")
    assert lines == [
        *("[ranks 0-2] epoch 0: 100%", "[ranks 0-2] loss 0"),
        *("[ranks 0-2] epoch 1: 100%", "[ranks 0-2] loss 1"),
        *("[ranks 0-2] epoch 2: 100%", "[ranks 0-2] loss 2"),
        "[ranks 0-2] saved",
    ]
    assert bench.lines("stderr") == ["[rank 0] written", "[ranks 0-2] saved"]


def test_real_tqdm_in_colour() -> None:
    bench = Bench([0])
    terminal = Terminal(bench)
    for _ in bar(terminal, 3, colour="green"):
        terminal.send(0.2)
    terminal.send()
    (line,) = bench.end()
    assert "\x1b[32m" in line
    assert "\x1b[0m" in line


class CutUp(Terminal):
    """As the streams of a busy rank: time may pass between any two messages."""

    def __init__(self, bench: Bench, rank: int, chance: random.Random) -> None:
        super().__init__(bench, rank)
        self._chance = chance

    def flush(self) -> None:
        self.send(self._chance.choice([0.0, 0.0, 0.001, 0.004]))


def epochs(terminal: Terminal, *, nested: bool, leave: bool, position: int) -> Iterator[None]:
    """A training loop with bars, and with lines written and logged between."""
    options: dict[str, Any] = {"file": terminal, "mininterval": 0, "ncols": 60}
    for epoch in tqdm(range(2), desc="outer", position=position, **options) if nested else range(2):
        for step in tqdm(range(5), desc=f"epoch {epoch}", leave=leave, position=position + nested, **options):
            if step == 2:
                tqdm.write(f"written {epoch}", file=terminal)
            if step == 3:
                terminal.write(f"logged {epoch}\n")
                terminal.flush()
            yield
        terminal.bench.print(terminal.rank, f"loss {epoch}\n")


@pytest.mark.parametrize("seed", range(60))
def test_no_output_is_lost_or_duplicated_at_any_timing(seed: int) -> None:
    chance = random.Random(seed)
    num_ranks, nested, spread = chance.randint(1, 4), chance.random() < 0.5, chance.random() < 0.5
    bench = Bench(range(num_ranks))
    terminals = [CutUp(bench, rank, chance) for rank in range(num_ranks)]
    running = [epochs(t, nested=nested, leave=not nested, position=t.rank if spread else 0) for t in terminals]
    while running:
        running = [loop for loop in running if next(loop, "ended") is None]
        for terminal in terminals:
            terminal.send()
        bench.pass_time(chance.choice([0.0, 0.01, 0.05, 0.2]))
    lines = percents(bench.end())
    bars = ["outer: 100%"] if nested else ["epoch 0: 100%", "epoch 1: 100%"]
    text = [f"{kind} {epoch}" for epoch in range(2) for kind in ("written", "logged", "loss")]
    for rank in range(num_ranks):
        own = [text for ranks, text in map(ranks_of, lines) if rank in ranks]
        assert sorted(own) == sorted([*bars, *text])
        assert [line for line in own if line in text and "loss" not in line] == [x for x in text if "loss" not in x]
