"""The checks that need one process.

Each imports what it tries, because an import that fails is a result, too.
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

from axon_nb.engine.self_test.process import CheckProcess
from axon_nb.records.hooks import missing_hooks


def _raise_if_missing(*groups: str, **objects: Any) -> None:
    if names := [name for group in groups for name in missing_hooks(group, **objects)]:
        raise AttributeError(f"missing: {', '.join(names)}")


def optimizer_steps(_: CheckProcess) -> None:
    """Find an optimizer's step on the stack."""
    from axon_nb.engine import step_frames

    depths: list[int] = []

    class RecordingSGD(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            depths.append(step_frames.step_depth(sys._getframe()))
            return super().step(closure)

    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    RecordingSGD(model.parameters(), lr=0.1).step()
    if depths != [1]:
        raise AssertionError(f"one step was counted as {depths}")


def interrupts(_: CheckProcess) -> None:
    """Leave a loop that catches everything, at a line that no `try` guards."""
    from axon_nb.engine.kernel import interrupts

    _raise_if_missing("interrupts.guarded_lines")

    def stubborn() -> None:
        while True:
            with contextlib.suppress(BaseException):
                time.sleep(0.001)

    def on_alarm(_: int, frame: FrameType | None) -> None:
        outermost = frame
        while outermost is not None and outermost.f_code is not stubborn.__code__:
            outermost = outermost.f_back
        if outermost is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            interrupts.force_interrupt(frame, outermost)

    previous = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)  # repeated, in case the first comes before the loop starts
    try:
        stubborn()
    except KeyboardInterrupt:
        pass
    finally:
        interrupts.clear_forced_interrupt()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def kernel_hooks(_: CheckProcess) -> None:
    """Find everything in an engine's kernel that axon_nb replaces."""
    from ipyparallel.engine.kernel import IPythonParallelKernel

    _raise_if_missing("kernel.cells", kernel=IPythonParallelKernel())


def short_tracebacks(_: CheckProcess) -> None:
    """Show only the ends of a traceback of 500 calls in an engine's shell."""
    from ipyparallel.engine.kernel import IPythonParallelKernel

    from axon_nb.engine.kernel.tracebacks import Tracebacks

    shell: Any = IPythonParallelKernel().shell
    shell.run_cell("def fall(depth): return fall(depth - 1) if depth else 1 / 0")
    _raise_if_missing("kernel.failures", "kernel.frames", "kernel.tracebacks", shell=shell)
    Tracebacks().install_bounded(shell)
    shell.run_cell("fall(500)")
    shown = "\n".join(shell._last_traceback)
    if "are not shown" not in shown or shown.count("fall") > 200:
        raise AssertionError(f"a traceback of 500 calls shows {shown.count('fall')} of them")


def sharding_views(_: CheckProcess) -> None:
    """Find what the views read from DTensor and FSDP2."""
    _raise_if_missing("sharding.placement", "sharding.gathering", "live_objects.states")


def pipeline_spans(_: CheckProcess) -> None:
    """Find what axon_nb wraps in pipelines to record their actions."""
    _raise_if_missing("parallel.pipeline_spans")


def mock_worlds(_: CheckProcess) -> None:
    """Reduce a tensor over two ranks inside this process."""
    from axon_nb.comm import World

    def work(world: Any) -> list[float]:
        tensor = torch.full((2,), world.rank() + 1.0)
        torch.distributed.all_reduce(tensor)
        return tensor.tolist()

    if (results := World.mock(2).run(work)) != [[3.0, 3.0]] * 2:
        raise AssertionError(f"a mock world returned {results}")


def simulation(_: CheckProcess) -> None:
    """Run a sharded step as one rank of a fake world, on tensors without data."""
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
                raise AssertionError("a sharded step on tensors without data gave no sharded gradient")
