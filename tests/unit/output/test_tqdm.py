"""Real tqdm on ranks: what its output looks like on the notebook's screen."""

from __future__ import annotations

import io
import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest
from tqdm import tqdm

from tests.support.cell_output import Bench, ranks_of


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


def test_real_tqdm_with_lines_between() -> None:
    bench = Bench([0])
    terminal = Terminal(bench)
    for i in bar(terminal, 5, desc="epoch"):
        if i == 2:
            tqdm.write("a line between", file=terminal)
        terminal.send(0.2)
    terminal.send()
    assert percents(bench.end()) == ["[rank 0] epoch: 100%", "[rank 0] a line between"]
    assert bench.lines("stderr") == ["[rank 0] a line between"]


@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.05, 0.3])
def test_real_tqdm_with_logging_between(seconds: float) -> None:
    bench = Bench([0])
    terminal = Terminal(bench)
    log = logging.getLogger("test_real_tqdm")
    log.propagate = False
    log.addHandler(handler := logging.StreamHandler(terminal))
    for i in bar(terminal, 6):
        terminal.send(seconds)
        log.warning("at %d", i)
    log.removeHandler(handler)
    terminal.send()
    lines = bench.end()
    assert bench.lines("stderr") == [f"[rank 0] at {i}" for i in range(6)]
    assert percents([line for line in lines if "at" not in line]) == ["[rank 0] 100%"]


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
                row = f"\repoch {epoch}: {step * 100 // 7}%|#| {step}/7 [00:0{rank}<00:00, 9it/s]"
                bench.print(rank, row, "stderr")
                if step == 7:
                    bench.pass_time(offset)
                    bench.print(rank, "\n", "stderr")
                    bench.print(rank, f"loss {epoch}\n")
                    bench.print(rank, f"\repoch {epoch + 1}: 0%|#| 0/7 [00:0{rank}<00:00, 9it/s]", "stderr")
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
