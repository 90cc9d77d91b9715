"""What `axon_nb.log` keeps, the progress of loops, and throughput."""

from __future__ import annotations

import gc
import math
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import axon_nb
from axon_nb.cluster.output.lines import METER, METER_NAME
from axon_nb.errors import UsageError
from axon_nb.records.spans import covered_ns
from axon_nb.records.telemetry import set_cell_source
from axon_nb.records.training import job
from axon_nb.records.training import job as module
from axon_nb.records.training.job import Bar, Logged, MetricRing, RateMeter, Throughput, bars

S = 1_000_000_000


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> MetricRing:
    """A ring of the test's own, behind `axon_nb.log`."""
    made = MetricRing(capacity=16)
    monkeypatch.setattr(module, "metrics", made)
    return made


@pytest.fixture
def cell() -> Iterator[list[int]]:
    """The number of the cell that runs, to be set."""
    number = [0]
    set_cell_source(lambda: number[0])
    yield number
    set_cell_source(lambda: None)


def rows(ring: MetricRing) -> list[tuple[int, dict[str, Any]]]:
    """(step, values) of all that is kept."""
    return [(row.step, row.values) for row in ring.read(0)[0]]


def test_steps_are_counted_per_name_or_given(ring: MetricRing) -> None:
    for value in (3.0, 2.0):
        axon_nb.log(loss=value)
        axon_nb.log(lr=0.1)
    axon_nb.log(loss=1.0, lr=0.2)
    axon_nb.log(accuracy=0.5, step=7)
    assert rows(ring) == [
        (0, {"loss": 3.0}),
        (0, {"lr": 0.1}),
        (1, {"loss": 2.0}),
        (1, {"lr": 0.1}),
        (2, {"loss": 1.0, "lr": 0.2}),
        (7, {"accuracy": 0.5}),
    ]
    assert ring.pace.steps == 3


def test_all_kinds_of_numbers_are_accepted(ring: MetricRing) -> None:
    running = torch.tensor(1.5, requires_grad=True)
    total = torch.zeros(())
    axon_nb.log(a=running, b=np.float32(0.25), c=np.int64(3), d=True, e=total, f=torch.tensor([2.0]), g=10**400)
    total += 1
    ((_, values),) = rows(ring)
    assert values == {"a": 1.5, "b": 0.25, "c": 3.0, "d": 1.0, "e": 0.0, "f": 2.0, "g": math.inf}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"loss": "3"}, "loss has type str: `axon_nb.log` accepts numbers"),
        ({"loss": None}, "loss has type NoneType"),
        ({"loss": torch.ones(2, 3)}, r"shape \(2, 3\): log a single number, such as loss.mean"),
        ({"loss": torch.tensor(1j)}, "loss has type Tensor: `axon_nb.log` accepts numbers"),
        ({"loss": torch.ones((), device="meta")}, "loss has type Tensor"),
        ({"loss": 1.0, "step": -1}, "step=-1: must be an integer >= 0"),
        ({"loss": 1.0, "step": 1.5}, "step=1.5"),
        ({"loss": 1.0, "items": "many"}, "items has type str"),
    ],
)
def test_non_numeric_value_raises(ring: MetricRing, given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        axon_nb.log(**given)
    assert rows(ring) == []


def test_lower_step_starts_a_new_run(ring: MetricRing, cell: list[int]) -> None:
    cell[0] = 5
    for step in (0, 1, 0):
        axon_nb.log(loss=1.0, step=step)
    cell[0] = 9
    axon_nb.log(loss=1.0, step=1)
    axon_nb.log(loss=1.0, step=0)
    axon_nb.log(loss=1.0)
    found, _, _ = ring.read(0)
    assert [(row.step, row.run, row.is_first) for row in found] == [
        (0, (5, 0), True),
        (1, (5, 0), True),
        (0, (5, 1), False),
        (1, (5, 1), False),
        (0, (9, 0), False),
        (1, (9, 0), False),
    ]


def test_new_process_joins_the_run_of_its_first_cell(ring: MetricRing, cell: list[int]) -> None:
    cell[0] = 9
    axon_nb.log(loss=1.0, step=4)
    assert ring.read(0)[0] == [Logged(4, (9, 0), True, {"loss": 1.0}, 4, (9, 0))]


def test_each_cell_is_a_run_that_counts_its_own_steps(ring: MetricRing, cell: list[int]) -> None:
    for cell[0], steps in ((3, (None, None)), (8, (None, None)), (9, (0, 1)), (12, (2, None, 0))):
        for step in steps:
            axon_nb.log(loss=1.0, step=step)
    found, _, _ = ring.read(0)
    runs = [(3, 0), (3, 0), (8, 0), (8, 0), (9, 0), (9, 0), (12, 0), (12, 0), (12, 1)]
    assert [row.shown_run for row in found] == runs
    assert [row.shown_step for row in found] == [0, 1, 0, 1, 0, 1, 2, 3, 0]
    assert [row.step for row in found] == [0, 1, 2, 3, 0, 1, 2, 3, 0], "a tracker goes on"


def test_readers_count_missed_records(ring: MetricRing) -> None:
    for _ in range(20):
        axon_nb.log(loss=1.0)
    found, position, lost = ring.read(0, limit=10)
    assert ([row.step for row in found], position, lost) == (list(range(4, 14)), 14, 4)
    assert [row.step for row in ring.read(position)[0]] == list(range(14, 20))
    assert ring.read(20) == ([], 20, 0)
    assert len(ring.read(999)[0]) == 16, "a position of another process"


def test_items_alone_are_counted_for_the_throughput(ring: MetricRing) -> None:
    axon_nb.log(items=32)
    axon_nb.log(items=torch.tensor(32))
    assert rows(ring) == []
    assert ring.pace.steps == 0


def test_log_is_a_no_op_in_plain_python() -> None:
    code = (
        "import sys, axon_nb\naxon_nb.log(loss=1.0, step=3)\nlist(axon_nb.progress([1, 2], desc='x'))\n"
        "assert not {'torch', 'numpy', 'IPython', 'zmq'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert "2/2" in done.stderr


@pytest.fixture
def loop_cell(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """No loop is known yet; the number of the cell that runs."""
    number = [1]
    set_cell_source(lambda: number[0])
    monkeypatch.setattr(job, "_loops", job._OpenLoops())
    yield number
    set_cell_source(lambda: None)


def seen() -> list[tuple[str, int, int, int | None, bool]]:
    """(name, depth, done, total, whether it is over) of each loop."""
    return [(bar.desc, bar.depth, bar.done, bar.total, bar.is_over) for bar in bars()]


@pytest.mark.usefixtures("loop_cell")
def test_items_count_once_they_are_processed() -> None:
    during = []
    for item in axon_nb.progress([5, 6], desc="epochs"):
        for _ in axon_nb.progress((x for x in "abc"), desc="batches", total=3):
            pass
        during.append((item, seen()))
    assert during[1] == (6, [("epochs", 0, 1, 2, False), ("batches", 1, 3, 3, True)])
    assert seen() == [("epochs", 0, 2, 2, True), ("batches", 1, 3, 3, True)]


@pytest.mark.usefixtures("loop_cell")
def test_loop_left_early_ends_at_that_item() -> None:
    for i in axon_nb.progress(range(10)):
        if i == 4:
            break
    assert seen() == [("", 0, 4, 10, True)]


@pytest.mark.usefixtures("loop_cell")
def test_loops_of_earlier_cells_are_dropped(loop_cell: list[int]) -> None:
    list(axon_nb.progress(range(2), desc="one"))
    loop_cell[0] = 2
    list(axon_nb.progress(range(3), desc="two"))
    assert [bar.desc for bar in bars()] == ["two"]


@pytest.mark.usefixtures("loop_cell")
def test_length_and_bad_input() -> None:
    assert len(axon_nb.progress([1, 2])) == 2
    with pytest.raises(TypeError, match="has no length"):
        len(axon_nb.progress(iter([1])))
    with pytest.raises(UsageError, match=r"progress\(int\): must be iterable"):
        axon_nb.progress(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"total=2.5\): must be an integer >= 0"):
        axon_nb.progress([], total=2.5)  # type: ignore[arg-type]
    assert axon_nb.progress([], total=np.int64(3)).snapshot().total == 3


@pytest.mark.usefixtures("loop_cell")
def test_lines_look_like_tqdm(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_REDRAW_S", 0.0)
    for _ in axon_nb.progress(range(2), desc="epochs"):
        list(axon_nb.progress(range(3), desc="batches"))
    written = capsys.readouterr().err
    assert written.endswith("\n")
    written_rows = [row.rstrip() for row in written.replace("\n", "").split("\r") if row]
    assert all(METER.fullmatch(row) for row in written_rows), written_rows
    name = METER_NAME.match(written_rows[-1])
    assert name is not None
    assert name.groups() == ("epochs:", "2")
    assert any("batches 2/3" in row for row in written_rows)


@pytest.mark.usefixtures("loop_cell")
def test_other_ranks_of_a_launcher_draw_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    list(axon_nb.progress(range(3)))
    assert capsys.readouterr().err == ""
    assert seen() == [("", 0, 3, 3, True)]


@pytest.mark.usefixtures("loop_cell")
def test_bar_is_a_plain_record() -> None:
    assert Bar("x", 0, 1, None, 0.5, is_over=False).unit == "it"


@pytest.mark.usefixtures("loop_cell")
def test_interrupt_on_loop_exit_prints_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def write(self, text: str) -> int:
            raise KeyboardInterrupt

        def flush(self) -> None: ...

    ignored: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: ignored.append(found.exc_value))
    items = iter(axon_nb.progress(range(3), desc="left"))
    next(items)
    monkeypatch.setattr(sys, "stderr", Interrupted())
    del items
    gc.collect()
    assert ignored == []
    assert seen() == [("left", 0, 0, 3, True)]


def test_rates_come_from_the_last_marks() -> None:
    pace = RateMeter()
    assert pace.rates(0, cell=0) == Throughput()
    for i in range(100):
        pace.mark(i * S // 10, items=8)
    rates = pace.rates(99 * S // 10, cell=0)
    assert rates.steps_per_s == pytest.approx(10)
    assert rates.items_per_s == pytest.approx(80)
    for i in range(3):
        pace.mark(1000 * S + i * S, items=0)
    assert pace.rates(1002 * S, cell=0).steps_per_s == pytest.approx(1)


def test_long_running_step_counts_toward_the_rate() -> None:
    pace = RateMeter()
    for i in range(5):
        pace.mark(i * S)
    assert pace.rates(40 * S, cell=0).steps_per_s == pytest.approx(0.1)
    assert pace.rates(40 * S, cell=None).steps_per_s == pytest.approx(1)


def test_cell_without_steps_has_no_rate() -> None:
    pace = RateMeter()
    for i in range(5):
        pace.mark(i * S)
    assert pace.rates(40 * S, cell=7) == Throughput()


def test_consecutive_slow_steps_have_a_rate() -> None:
    pace = RateMeter()
    pace.mark(0)
    pace.mark(60 * S)
    assert pace.rates(61 * S, cell=0).steps_per_s == pytest.approx(1 / 60)
    twice = RateMeter()
    twice.mark(5)
    twice.mark(5)
    assert twice.rates(5, cell=None) == Throughput()


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12), st.integers(0, 60), st.integers(0, 60))
def test_overlaps_are_counted_once(intervals: list[tuple[int, int]], begin: int, end: int) -> None:
    inside = {t for first, last in intervals for t in range(first, last) if begin <= t < end}
    assert covered_ns(intervals, begin, end) == len(inside)
