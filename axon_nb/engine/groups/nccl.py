"""NCCL: what its ranks need set, how a communicator is connected, aborted and replaced.

Written against torch's sources and not run on a machine with several GPUs: docs/design/nccl.md lists what is tested.

No optimizer step on gradients of an aborted collective.

On a GPU the CPU runs ahead: when a step is called, the collectives that its gradients come from may still be under way.
An abort ends them with whatever is in their buffers, and the kernels of a step that is in the queue already would write
that into the weights. So a step waits until the GPU has done all that came before it, and does not begin once the cell
is being ended. The price: the queue runs empty once a step.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, MutableMapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.optim.optimizer import register_optimizer_step_pre_hook

from axon_nb.engine.groups.abort import ABORT, AbortedError
from axon_nb.engine.groups.native import BackendKind, NativeGroups
from axon_nb.records.environment import NCCL_INTERFACE
from axon_nb.torch_api import torch_api

__all__ = [
    "ABORT_TIMEOUT_S",
    "DEFAULTS",
    "REQUIRED",
    "groups",
    "install_fence",
    "install_native_groups",
    "poll_until",
    "set_environment",
]

ABORT_TIMEOUT_S = 5.0
"""Seconds that a communicator may take to end; after that the rank counts as stuck."""

_CONNECT_LIMIT_S = 30.0

REQUIRED = {
    # Else torch's watchdog ends the process when an aborted collective fails.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}
"""What is set on NCCL ranks before CUDA and NCCL start, whatever it was."""

DEFAULTS = {
    # "nccl" is ProcessGroupNCCL2 since 2.15, which connects in its constructor: how a newcomer joins there has not been
    # run. The older class is still shipped (pytorch#192281).
    "TORCH_DIST_USE_NCCL2": "0",
    # A blocking connect has no handle that could be aborted.
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",
    # While a call waits for a communicator to connect, torch holds its lock, and an abort waits for that: this ends it.
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "30",
    # Who is in which collective is read from torch's recorder.
    "TORCH_FR_BUFFER_SIZE": "1000",
}
"""What is set there unless the user has set it."""


_groups: list[NativeGroups] = []


def set_environment(environ: MutableMapping[str, str] = os.environ, *, one_host: bool) -> None:
    """Set what NCCL ranks need; call it before the first CUDA call.

    Args:
        environ: The process's environment.
        one_host: Whether all ranks are on this host: then NCCL's sockets, which know no authentication, listen on
            loopback alone.
    """
    environ.update(REQUIRED)
    for name, value in DEFAULTS.items():
        environ.setdefault(name, value)
    if one_host:
        environ.setdefault(NCCL_INTERFACE.name, NCCL_INTERFACE.default)


def install_native_groups(
    root: Store, *, device: torch.device, timeout: timedelta, kind: BackendKind | None = None
) -> NativeGroups:
    """From now on NCCL groups of this rank, or those of another `kind`, can be aborted and formed anew."""
    _groups[:] = [NativeGroups(kind or _KIND, root, device=device, timeout=timeout)]
    return _groups[0]


def groups() -> NativeGroups | None:
    """The NCCL groups of this rank; None on a Gloo rank."""
    return _groups[0] if _groups else None


def _owns(backend: Any) -> bool:
    return isinstance(backend, torch_api().nccl_classes())


def _connect(store: Store, group: dist.ProcessGroup, ranks: list[int], timeout: timedelta, device: torch.device) -> Any:
    torch.cuda.set_device(device)  # each thread has one of its own, and this is a helper
    options: Any = dist.ProcessGroupNCCL.Options()  # of both classes
    options._timeout = timeout
    options.global_ranks_in_group = ranks
    options.group_name = group.group_name
    # The class that the group has, which is the same on all its ranks.
    kind = type(group._get_backend(torch.device(device.type)))
    backend = _make(kind, store, group, options, device)
    torch_api().begin_sequence(backend)
    backend.eager_connect_single_device(device)  # does nothing where the constructor has connected
    return backend


def _make(kind: Any, store: Store, group: dist.ProcessGroup, options: Any, device: torch.device) -> Any:
    if "device_id" in (kind.__init__.__doc__ or ""):
        # `ProcessGroupNCCL2` of 2.15 connects in its constructor, and not to `device` unless it is given.
        return kind(store, group.rank(), group.size(), options, device)
    return kind(store, group.rank(), group.size(), options)


def _abort(backend: Any) -> None:
    # It also raises when it took longer than the group's limit; the deadline of who waits for it is shorter.
    with contextlib.suppress(RuntimeError):
        backend.abort()


_KIND = BackendKind(owns=_owns, connect=_connect, abort=_abort, connect_timeout_s=_CONNECT_LIMIT_S)


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
        poll_until(done.query)
    # The flag is set before communicators are aborted: work that ended because of that is seen here.
    _refuse()


def poll_until(done: Callable[[], bool]) -> None:
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
        raise AbortedError("aborted before optimizer.step")


def _cuda_devices(optimizer: torch.optim.Optimizer) -> set[torch.device]:
    param_groups: Iterable[dict[str, Any]] = optimizer.param_groups
    return {parameter.device for group in param_groups for parameter in group["params"] if parameter.is_cuda}
