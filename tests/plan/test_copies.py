"""Running functions in forked processes."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from axon_nb.errors import UsageError
from axon_nb.plan.process import fork_map, run_in_process


def several(task: Any, report: Any) -> dict[str, Any]:
    """Run in a process without threads, like plans."""
    here = os.getpid()

    def dies() -> int:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return 7

    def refuses() -> int:
        raise UsageError("no")

    def nested() -> list[int]:
        return fork_map([os.getpid, os.getpid])

    found: dict[str, Any] = {"squares": fork_map([partial(pow, number, 2) for number in range(5)])}
    found["died"] = fork_map([dies, partial(int, 1)])
    found["nested"] = [len(set(numbers)) for numbers in fork_map([nested, nested])]
    for name, calls in {"first": [refuses, partial(int, 1)], "last": [partial(int, 1), refuses]}.items():
        try:
            fork_map(calls)
        except UsageError as error:
            found[name] = str(error)
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        found["left"] = 0
    return found


def test_all_calls_return_and_no_process_remains() -> None:
    found = run_in_process(several, cloudpickle.dumps(None))
    assert found == {
        "squares": [0, 1, 4, 9, 16],
        "died": [7, 1],
        "nested": [1, 1],
        "first": "no",
        "last": "no",
        "left": 0,
    }


def forks_that_die(task: Any, report: Any) -> dict[str, Any]:
    """Run in a process without threads: a function whose first fork dies, then one whose forks all die."""
    here, first = os.getpid(), Path(task)

    def dies_once() -> float:
        if not first.exists():
            first.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return backward()

    def dies() -> float:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return backward()

    return {
        "once": fork_map([dies_once, backward]),
        "forked": here not in fork_map([os.getpid, os.getpid]),
        "always": fork_map([dies, backward]),
        "later": fork_map([backward, backward]),
    }


def test_plans_continue_after_killed_forks(tmp_path: Path) -> None:
    """Also with CUDA builds of torch, whose forks refuse a backward once this process has made one."""
    found = run_in_process(forks_that_die, cloudpickle.dumps(str(tmp_path / "first")))
    assert found == {"once": [6.0, 6.0], "forked": True, "always": [6.0, 6.0], "later": [6.0, 6.0]}


def backward() -> float:
    """Compute a gradient; with CUDA builds of torch, later forks of the same process cannot compute another."""
    x = torch.ones(2, requires_grad=True)
    (x * 3).sum().backward()
    assert x.grad is not None
    return float(x.grad.sum())


def sequential_forks(task: Any, report: Any) -> list[list[float]]:
    """Run in a process without threads: one backward, then several at once."""
    return [fork_map([backward]), fork_map([backward, backward]), fork_map([])]


def test_single_backward_does_not_break_later_ones() -> None:
    found = run_in_process(sequential_forks, cloudpickle.dumps(None))
    assert found == [[6.0], [6.0, 6.0], []]
