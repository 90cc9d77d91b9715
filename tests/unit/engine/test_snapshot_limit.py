"""Snapshots within a limit of memory: what does not fit is left out as a whole, and named if it has changed."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch

from axon_nb.engine.snapshot.history import History
from axon_nb.engine.snapshot.memory import HostMemory

LIMIT = 1 << 19


class Counts:
    """Optimizers without steps."""

    def of(self, optimizer: torch.optim.Optimizer) -> int:
        return 0

    def set(self, optimizer: torch.optim.Optimizer, steps: int) -> None:
        return


def session() -> dict[str, Any]:
    model = torch.nn.Linear(512, 512)
    return {
        "__name__": "__main__",
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "small": torch.zeros(4),
        "losses": [0.5],
    }


def run(history: History, space: dict[str, Any], statement: str, number: int = 1) -> None:
    history.before_cell(str(number), number, (0,), LIMIT)
    exec(statement, {"torch": torch}, space)


def changed(history: History) -> list[str]:
    return history.changed_above_limit(history.cells[-1])


def test_small_variables_are_undone_beside_a_model_above_the_limit() -> None:
    space = session()
    history = History(space, Counts(), HostMemory())
    run(history, space, "small.add_(1); losses.append(0.4); extra = 1; model(torch.ones(1, 512))")
    assert changed(history) == []
    snapshot = history.cells[-1].snapshot
    assert snapshot is not None
    assert sorted(snapshot.state.obstacles) == ["model", "optimizer"], "what shares the weights is left out with them"
    assert snapshot.state.obstacles["model"].startswith("needs 1.")
    assert history.undo("1") == []
    assert (space["small"].tolist(), space["losses"], "extra" in space) == ([0.0] * 4, [0.5], False)
    assert isinstance(space["model"], torch.nn.Linear)


@pytest.mark.parametrize(
    ("statement", "names"),
    [
        ("model(torch.ones(1, 512)).sum().backward()", ["model"]),
        ("with torch.no_grad(): model.bias.add_(1)", ["model"]),
        ("model = torch.nn.Linear(2, 2)", ["model"]),
        ("del optimizer", ["optimizer"]),
    ],
)
def test_change_above_the_limit_is_noticed(statement: str, names: list[str]) -> None:
    space = session()
    history = History(space, Counts(), HostMemory())
    run(history, space, statement)
    assert changed(history) == names


def test_variable_with_too_many_objects_is_left_out_and_its_tensors_are_watched() -> None:
    space = session()
    space["rows"] = [[torch.zeros(1)], [{"number": number} for number in range(200_000)]]
    history = History(space, Counts(), HostMemory())
    for number in (1, 2):
        run(history, space, "small.add_(1)", number)
        snapshot = history.cells[-1].snapshot
        assert snapshot is not None
        assert snapshot.state.obstacles["rows"] == "needs more than 512 KiB of `undo_memory`"
        assert len(snapshot.state.nodes) < 100
    assert changed(history) == []
    space["rows"][0][0].add_(1)
    assert changed(history) == ["rows"]
    assert history.undo("1") == []
    assert space["small"].tolist() == [0.0] * 4


def test_snapshots_do_not_keep_alive_what_has_outgrown_the_limit() -> None:
    space: dict[str, Any] = {"cache": {}, "small": torch.zeros(4)}
    history = History(space, Counts(), HostMemory())
    run(history, space, "cache['big'] = torch.zeros(1 << 20)", 1)
    alive = weakref.ref(space["cache"]["big"])
    run(history, space, "del cache", 2)
    assert alive() is None
    assert [cell.run for cell in history.cells] == ["2"]


def test_deleted_generator_and_thread_end_at_once() -> None:
    space = session() | {"thread": threading.Thread(), "items": (number for number in range(9))}
    kept = [weakref.ref(space[name]) for name in ("thread", "items")]
    history = History(space, Counts(), HostMemory())
    run(history, space, "del thread, items")
    assert [ref() for ref in kept] == [None, None]
    snapshot = history.cells[-1].snapshot
    assert snapshot is not None
    assert {"thread", "items"} <= snapshot.state.obstacles.keys()
    assert history.undo("1") == []
    assert "thread" not in space
