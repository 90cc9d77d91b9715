"""Plants a fault on a rank, and takes it out again when its block ends."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from axon_course.faults.cases import Fault, Kind, draw
from axon_course.journal import Journal
from axon_nb.errors import UsageError

__all__ = ["Fault", "planted"]

_NAP_S = 0.3
_LEAKED = 1 << 21
"""Numbers of float32 that a leaking rank keeps in each step: 8 MiB."""


@contextlib.contextmanager
def planted(fault: Fault | int | None, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let one rank go wrong in the block, which is a training loop with one call of each `Place` per step.

    Use it in a cell on ranks. Nothing of it is left after the block, except what the fault itself did.

    Args:
        fault: What goes wrong; a number: that case of the learner's bug hunt; None: nothing.
        model: Called once per step.
        optimizer: Steps once per step.

    Raises:
        UsageError: this process is not a rank, or there is no such case.
    """
    if not dist.is_initialized() or threading.current_thread() is not threading.main_thread():
        raise UsageError("planted(…) works on ranks: put it into a cell that begins with %%distributed.")
    if isinstance(fault, int):
        fault = draw(fault, seed=Journal().seed, ranks=dist.get_world_size())
    with contextlib.ExitStack() as removed:
        if fault is not None and fault.rank == dist.get_rank():
            _plant(fault, model, optimizer, removed)
        yield


def _plant(
    fault: Fault, model: torch.nn.Module, optimizer: torch.optim.Optimizer, removed: contextlib.ExitStack
) -> None:
    if fault.kind == "stale":
        kept: list[torch.Tensor] = []

        def keep(*_: Any) -> None:
            kept[:] = [weight.detach().clone() for weight in model.parameters()]

        def put_back() -> None:
            with torch.no_grad():
                for weight, before in zip(model.parameters(), kept, strict=True):
                    weight.copy_(before)

        removed.callback(optimizer.register_step_pre_hook(keep).remove)
        removed.callback(optimizer.register_step_post_hook(_from(fault.step, put_back)).remove)
    elif fault.place == "forward":
        effects = {"slow": lambda: time.sleep(_NAP_S), "leak": lambda: _leak(model)}
        effect = effects.get(fault.kind) or (lambda: _fail(fault.kind))
        removed.callback(model.register_forward_pre_hook(_from(fault.step, effect)).remove)
    else:
        removed.enter_context(patch.object(dist, fault.place, _changed(fault)))


def _from(step: int, effect: Callable[[], None]) -> Callable[..., None]:
    """Return a hook that has an effect from its call number `step` on, counted from 0."""
    count = itertools.count()

    def hook(*_: Any) -> None:
        if next(count) >= step:
            effect()

    return hook


def _changed(fault: Fault) -> Callable[..., Any]:
    """Return the collective with the fault in one of its calls."""
    original = getattr(dist, fault.place)
    count = itertools.count()

    def call(tensor: Any, *args: Any, **options: Any) -> Any:
        if next(count) != fault.step:
            return original(tensor, *args, **options)
        if fault.kind == "skipped":
            return None
        if fault.kind == "swapped":
            return dist.barrier()
        if fault.kind == "shape":
            tensor = torch.cat([tensor, tensor[:1]])
        elif fault.kind == "dtype":
            tensor = tensor.double()
        else:
            _fail(fault.kind)
        return original(tensor, *args, **options)

    return call


def _fail(kind: Kind) -> None:
    if kind == "raised":
        raise ValueError("this sample cannot be read")
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    while kind == "endless":
        time.sleep(0.01)


def _leak(model: torch.nn.Module) -> None:
    """Keep some memory for as long as the model lives."""
    device = next(model.parameters()).device
    model.__dict__.setdefault("kept", []).append(torch.ones(_LEAKED, device=device))
