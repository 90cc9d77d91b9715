"""Calculations in copies of a process."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

import cloudpickle
import pytest

from axon_nb.errors import UsageError
from axon_nb.plan.copies import together
from axon_nb.plan.worker import run_apart


def several(task: Any, report: Any) -> dict[str, Any]:
    """Run in a process without threads, as plans are."""
    here = os.getpid()

    def dies() -> int:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return 7

    def refuses() -> int:
        raise UsageError("no")

    def nested() -> list[int]:
        return together([os.getpid, os.getpid])

    found: dict[str, Any] = {"squares": together([partial(pow, number, 2) for number in range(5)])}
    found["died"] = together([dies, partial(int, 1)])
    found["nested"] = [len(set(numbers)) for numbers in together([nested, nested])]
    for name, calls in {"first": [refuses, partial(int, 1)], "last": [partial(int, 1), refuses]}.items():
        try:
            together(calls)
        except UsageError as error:
            found[name] = str(error)
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        found["left"] = 0
    return found


def test_all_are_answered_and_none_is_left() -> None:
    found = run_apart("tests.plan.test_copies:several", cloudpickle.dumps(None))
    assert found == {
        "squares": [0, 1, 4, 9, 16],
        "died": [7, 1],
        "nested": [1, 1],
        "first": "no",
        "last": "no",
        "left": 0,
    }


def test_one_alone_runs_here() -> None:
    assert together([os.getpid]) == [os.getpid()]
    assert together([]) == []
    with pytest.raises(ValueError, match="no"):
        together([partial(_raise, ValueError("no"))])


def _raise(error: Exception) -> None:
    raise error
