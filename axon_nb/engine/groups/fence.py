"""No optimizer step on gradients of an aborted collective.

On a GPU the CPU runs ahead: when a step is called, the collectives that its gradients come from may still be under way.
An abort ends them with whatever is in their buffers, and the kernels of a step that is in the queue already would write
that into the weights. So a step waits until the GPU has done all that came before it, and does not begin once the cell
is being ended. The price: the queue runs empty once a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from axon_nb.engine.groups.abort import ABORT, Aborted

__all__ = ["install_fence", "wait_for"]

_FIRST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 1e-3


def install_fence() -> Callable[[], None]:
    """From now on each optimizer step waits for what it depends on; returns what takes the fence away."""
    handle = register_optimizer_step_pre_hook(_before_step)
    return handle.remove


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    _refuse()
    devices = _cuda_devices(optimizer)
    if not devices or torch.cuda.is_current_stream_capturing():
        return  # a captured step does not run now
    for device in devices:
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(device))
        wait_for(done.query)
    # The flag is set before communicators are aborted: work that ended because of that is seen here.
    _refuse()


def wait_for(done: Callable[[], bool]) -> None:
    """Poll until `done`, where an interrupt and an abort can end the wait.

    Raises:
        Aborted: the cell is being ended.
    """
    pause = _FIRST_PAUSE_S
    while not done():
        _refuse()
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def _refuse() -> None:
    # Not `raise_if_aborted`: a step needs no group, and one of a model of this rank alone may run when they are broken.
    if ABORT.is_set():
        raise Aborted("aborted before optimizer.step")


def _cuda_devices(optimizer: torch.optim.Optimizer) -> set[torch.device]:
    param_groups: Iterable[dict[str, Any]] = optimizer.param_groups
    return {parameter.device for group in param_groups for parameter in group["params"] if parameter.is_cuda}
