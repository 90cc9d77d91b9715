"""NCCL: the environment of its ranks, and how a communicator is connected, aborted and replaced.

Written against torch's sources; not run on a machine with several GPUs. docs/design/nccl.md lists what is tested.

Also prevents optimizer steps on gradients of an aborted collective.

The CPU runs ahead of the GPU: when a step is called, the collectives that produce its gradients may still be running.
An abort ends them with arbitrary contents in their buffers, and a step whose kernels are already queued would write
those into the weights. So a step waits until the GPU has finished all earlier work, and does not start while the cell
is being aborted. The price: the queue runs empty once per step.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.optim.optimizer import register_optimizer_step_pre_hook

from axon_nb.engine.groups.abort import AbortedError, AbortFlag
from axon_nb.engine.groups.native import BackendKind, NativeGroups, backend_of
from axon_nb.engine.groups.state import current_groups
from axon_nb.records.environment import NCCL_INTERFACE
from axon_nb.torch_api import torch_api

ABORT_TIMEOUT_S = 5.0
"""Seconds that an abort of a communicator may take; after that the rank counts as stuck."""

_CONNECT_TIMEOUT_S = 30.0
_DEVICE_TIMEOUT_S = 10.0
_BUSY_S = 2.0
"""A device that takes calls for this long, and raises no error, is only busy."""

REQUIRED = {
    # Otherwise torch's watchdog terminates the process when an aborted collective fails.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # For each failed operation, the watchdog would sleep a minute with the lock that new operations need, and write to
    # the store.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}
"""Set on NCCL ranks before CUDA and NCCL start, whatever the value was."""

DEFAULTS = {
    # Since 2.15 "nccl" is ProcessGroupNCCL2, which connects in its constructor: how a replacement joins there is
    # untested. The older class is still shipped (pytorch#192281).
    "TORCH_DIST_USE_NCCL2": "0",
    # A blocking connect has no handle that could be aborted.
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",
    # Deadlock detection reads torch's flight recorder.
    "TORCH_FR_BUFFER_SIZE": "1000",
}
"""Set on NCCL ranks unless the user has set it."""


_MAX_POLL_S = 1e-3
_MIN_POLL_S = 20e-6


def set_environment(environ: MutableMapping[str, str] = os.environ, *, one_host: bool) -> None:
    """Set the environment variables of NCCL ranks; call it before the first CUDA call.

    Args:
        environ: The process's environment.
        one_host: Whether all ranks are on this host: then NCCL's sockets, which have no authentication, listen on
            loopback only.
    """
    environ.update(REQUIRED)
    for name, value in DEFAULTS.items():
        environ.setdefault(name, value)
    if one_host:
        environ.setdefault(NCCL_INTERFACE.name, NCCL_INTERFACE.default)


def set_interface(ip: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Make NCCL's sockets use the network interface with this address of this host, unless the user has named one.

    NCCL would take any, in spite of `--interface`; its sockets have no authentication.
    """
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == ip for entry in entries):
            environ.setdefault(NCCL_INTERFACE.name, f"={name}")  # "=": this one alone, not each that begins like it


def device_problem(device: torch.device, *, rank: int, launch: Callable[[], Callable[[], bool]] | None = None) -> str:
    """Return what to do if this rank cannot use its device any more; empty if it can, or if the device is only busy.

    A rank that dies can take the CUDA contexts of ranks with it that have mapped its memory. The test runs in a helper
    thread, because a call on a lost context may hang. It needs no memory, and is not queued behind other work.

    Args:
        device: Where this rank computes.
        rank: This rank.
        launch: Starts something on the device, and returns a function that says whether it is done.
    """
    if launch is None:
        if device.type != "cuda" or not torch.cuda.is_initialized():
            return ""  # nothing to lose
        launch = lambda: _record_beside_queue(device)  # noqa: E731
    why = _why_unusable(launch)
    return f"Rank {rank} cannot use {device} any more ({why}). Run `%distributed repair --ranks {rank}`." if why else ""


def _record_beside_queue(device: torch.device) -> Callable[[], bool]:
    done = torch.cuda.Event()
    done.record(torch.cuda.Stream(device))
    return done.query


def _why_unusable(launch: Callable[[], Callable[[], bool]]) -> str:
    answered_at = [began := time.monotonic()]
    reasons: list[str] = []

    def look() -> None:
        try:
            done = launch()
            while not done() and time.monotonic() - began < _BUSY_S:
                answered_at[0] = time.monotonic()
                time.sleep(_MAX_POLL_S)
            reasons.append("")
        except RuntimeError as error:
            reasons.append(str(error).partition("\n")[0])

    threading.Thread(target=look, name="axon_nb-device", daemon=True).start()
    while not reasons:
        if time.monotonic() - answered_at[0] > _DEVICE_TIMEOUT_S:
            return f"it has not answered for {_DEVICE_TIMEOUT_S:g} s"
        time.sleep(_MAX_POLL_S)
    return reasons[0]


def install_native_groups(
    root: Store, *, device: torch.device, timeout: timedelta, kind: BackendKind | None = None
) -> NativeGroups:
    """Make NCCL groups of this rank, or those of another `kind`, abortable and rebuildable from now on."""
    state = current_groups()
    state.native = NativeGroups(kind or NCCL, root, device=device, timeout=timeout, abort=state.abort)
    return state.native


def groups() -> NativeGroups | None:
    """Return the NCCL groups of this rank; None on a Gloo rank."""
    return current_groups().native


def _owns(backend: Any) -> bool:
    return isinstance(backend, torch_api().nccl_classes())


def _connect(store: Store, group: dist.ProcessGroup, ranks: list[int], timeout: timedelta, device: torch.device) -> Any:
    earlier = backend_of(group, device)
    options = earlier.options  # the group's own: NCCL's configuration, the priority of its stream
    options._timeout = timeout
    options.global_ranks_in_group = ranks
    options.group_name = group.group_name
    # The group's class, which is the same on all its ranks.
    backend = _make(type(earlier), store, group, options, device)
    torch_api().begin_sequence(backend)
    _start(backend, device)
    return backend


def _make(kind: Any, store: Store, group: dist.ProcessGroup, options: Any, device: torch.device) -> Any:
    if "device_id" in (kind.__init__.__doc__ or ""):
        # `ProcessGroupNCCL2` of 2.15 connects in its constructor, and ignores `device` unless it is passed.
        return kind(store, group.rank(), group.size(), options, device)
    return kind(store, group.rank(), group.size(), options)


def _abort(backend: Any) -> None:
    # It also raises if it took longer than the group's timeout; the caller's deadline is shorter.
    with contextlib.suppress(RuntimeError):
        backend.abort()


def _start(backend: Any, device: torch.device) -> None:
    """Connect a backend with a sum of one element; return when all ranks have connected.

    Not by `eager_connect_single_device`: after it every unbatched send and receive uses the communicator of the
    collectives, one after the other, and a ring of them that runs under torchrun may hang. It also returns before the
    connection is there.
    """
    with _beside_queue(device):
        tensor = torch.ones(1, device=device)
        work = backend.allreduce([tensor])
        while not work.is_completed():
            time.sleep(_MAX_POLL_S)
        work.wait()
        if tensor.item() != backend.size():
            raise RuntimeError("the sum that connects a group is wrong")


@contextlib.contextmanager
def _beside_queue(device: torch.device) -> Iterator[None]:
    """Run CUDA calls on a stream of their own, so that they do not wait for queued work."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_device(device)  # a setting per thread, and this is a helper thread
    with torch.cuda.stream(torch.cuda.Stream(device)):
        yield


NCCL = BackendKind(
    torch_name="nccl",
    owns=_owns,
    start=_start,
    connect=_connect,
    abort=_abort,
    connect_timeout_s=_CONNECT_TIMEOUT_S,
)
"""torch's own NCCL groups."""


def install_fence(abort: AbortFlag) -> Callable[[], None]:
    """Make each optimizer step wait for the work that it depends on; return a function that removes the fence."""
    handle = register_optimizer_step_pre_hook(lambda optimizer, *_: _before_step(optimizer, abort))
    return handle.remove


def _before_step(optimizer: torch.optim.Optimizer, abort: AbortFlag) -> None:
    _raise_if_aborted(abort)
    devices = _cuda_devices(optimizer)
    if not devices or torch.cuda.is_current_stream_capturing():
        return  # a captured step does not run now
    for device in devices:
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(device))
        poll_until(done.query, abort)
    # The flag is set before communicators are aborted, so work that an abort ended is noticed here.
    _raise_if_aborted(abort)


def poll_until(done: Callable[[], bool], abort: AbortFlag) -> None:
    """Poll until `done`; an interrupt or an abort can end the wait.

    Raises:
        AbortedError: the cell is being aborted.
    """
    interval = _MIN_POLL_S
    while not done():
        _raise_if_aborted(abort)
        time.sleep(interval)
        interval = min(2 * interval, _MAX_POLL_S)


def _raise_if_aborted(abort: AbortFlag) -> None:
    # Not `raise_if_set`: a step needs no group, so a model of this rank alone may train with broken groups.
    if abort.is_set():
        raise AbortedError("aborted before optimizer.step")


def _cuda_devices(optimizer: torch.optim.Optimizer) -> set[torch.device]:
    param_groups: Iterable[dict[str, Any]] = optimizer.param_groups
    return {parameter.device for group in param_groups for parameter in group["params"] if parameter.is_cuda}
