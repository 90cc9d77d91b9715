"""The checks that need one process.

Each imports what it tries: an import that fails is a result.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from types import FrameType
from typing import Any

import torch
from torch import nn

from axon_nb.engine.self_test.place import Place
from axon_nb.records.hooks import missing_hooks

__all__ = [
    "interrupts",
    "kernel_hooks",
    "mock_worlds",
    "pipeline_spans",
    "sharding_views",
    "short_tracebacks",
    "simulation",
    "whole_steps",
]


def _raise_if_missing(*groups: str, **objects: Any) -> None:
    if names := [name for group in groups for name in missing_hooks(group, **objects)]:
        raise AttributeError(f"missing: {', '.join(names)}")


def whole_steps(_: Place) -> None:
    """A step of an optimizer is found on the stack."""
    from axon_nb.engine.groups import abort

    depths: list[int] = []

    class Looking(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            depths.append(abort.step_depth(sys._getframe()))
            return super().step(closure)

    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    Looking(model.parameters(), lr=0.1).step()
    if depths != [1]:
        raise AssertionError(f"a step counts as {depths} steps")


def interrupts(_: Place) -> None:
    """A loop that catches everything is left at a line that no `try` guards."""
    from axon_nb.engine.kernel import interrupts as insist

    _raise_if_missing("interrupts.guarded_lines")

    def stubborn() -> None:
        while True:
            with contextlib.suppress(BaseException):
                time.sleep(0.001)

    def press(_: int, frame: FrameType | None) -> None:
        outermost = frame
        while outermost is not None and outermost.f_code is not stubborn.__code__:
            outermost = outermost.f_back
        if outermost is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            insist.insist(frame, outermost)

    previous = signal.signal(signal.SIGALRM, press)
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)  # again, where the first comes before the loop has begun
    try:
        stubborn()
    except KeyboardInterrupt:
        pass
    finally:
        insist.desist()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def kernel_hooks(_: Place) -> None:
    """The kernel of an engine has what is replaced in it."""
    from ipyparallel.engine.kernel import IPythonParallelKernel

    _raise_if_missing("kernel.cells", kernel=IPythonParallelKernel())


def short_tracebacks(_: Place) -> None:
    """The shell of an engine shows the ends of a traceback of 500 calls alone."""
    from ipyparallel.engine.kernel import IPythonParallelKernel

    from axon_nb.engine.kernel import tracebacks

    shell: Any = IPythonParallelKernel().shell
    shell.run_cell("def fall(depth): return fall(depth - 1) if depth else 1 / 0")
    _raise_if_missing("kernel.failures", "kernel.tracebacks", shell=shell)
    tracebacks.install_bounded_traceback(shell)
    shell.run_cell("fall(500)")
    shown = "\n".join(shell._last_traceback)
    if "are not shown" not in shown or shown.count("fall") > 200:
        raise AssertionError(f"a traceback of 500 calls has {shown.count('fall')}")


def sharding_views(_: Place) -> None:
    """What the views read of DTensor and FSDP2 is there."""
    _raise_if_missing("sharding.placement", "sharding.gathering", "live_objects.states")


def pipeline_spans(_: Place) -> None:
    """What is wrapped in pipelines to record their actions is there."""
    _raise_if_missing("parallel.pipeline_spans")


def mock_worlds(_: Place) -> None:
    """Two ranks inside this process reduce a tensor."""
    from axon_nb.comm import World

    def work(world: Any) -> list[float]:
        tensor = torch.full((2,), world.rank() + 1.0)
        torch.distributed.all_reduce(tensor)
        return tensor.tolist()

    if (found := World.mock(2).run(work)) != [[3.0, 3.0]] * 2:
        raise AssertionError(f"a mock world gave {found}")


def simulation(_: Place) -> None:
    """A rank of a world that does not exist runs a sharded step on tensors without data."""
    from torch.distributed.fsdp import fully_shard

    from axon_nb.plan.footprint import fake_world

    with fake_world.fake_world(0, 2):
        mesh = fake_world.mesh_of({"dp": 2})
        with fake_world.fake_tensors():
            model = nn.Linear(8, 8)
            fully_shard(model, mesh=mesh)
            model(torch.ones(2, 8)).sum().backward()
            weight: Any = model.weight
            if weight.grad is None or tuple(weight.to_local().shape) != (4, 8):
                raise AssertionError("a sharded step on tensors without data went wrong")
