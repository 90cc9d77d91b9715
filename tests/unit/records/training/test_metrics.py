"""What `axon_nb.log` accepts, rejects, counts and keeps."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import axon_nb
from axon_nb.errors import UsageError
from axon_nb.records.telemetry import set_cell_source
from axon_nb.records.training import job as module
from axon_nb.records.training.job import Logged, MetricRing


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
