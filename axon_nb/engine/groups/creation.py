"""Creates the groups of a rank: recoverable ones in torch's place, the default group, and NCCL's communicators.

Holds all private hooks into torch.distributed that this needs. Scripts still say "gloo". The self-test tries the hooks;
if they do not work, torch's own groups are used, with their timeouts, and the start says so.

NCCL is written against torch's sources: the environment of its ranks, and how a communicator is connected, aborted and
replaced. Not run on a machine with several GPUs; docs/design/nccl.md lists what is tested.

Also prevents optimizer steps on gradients of an aborted collective. The CPU runs ahead of the GPU: when a step is
called, the collectives that produce its gradients may still be running. An abort ends them with arbitrary contents in
their buffers, and a step whose kernels are already queued would write those into the weights. So a step waits until the
GPU has finished all earlier work, and does not start while the cell is being aborted. The price: the queue runs empty
once per step.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from concurrent.futures import wait
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.optim.optimizer import register_optimizer_step_pre_hook

from axon_nb.engine.groups.abort import AbortedError, AbortFlag, BackendKind, NativeGroups, backend_of, in_thread
from axon_nb.engine.groups.recoverable import RecoverableGroup
from axon_nb.engine.groups.state import GroupsState, current_groups, set_current_groups
from axon_nb.errors import UsageError
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
_NAME = "axon_nb"
_REPLACED = {"gloo", _NAME, "cpu:gloo", "undefined", "none"}
_MIXED = "cpu:gloo,cuda:nccl"
_OF_PIPELINES = "pp_p2p_"
"""How torch describes groups of one direction, of two ranks or all; it looks for neither's own number in them."""
c10d = dist.distributed_c10d


def set_nccl_environment(environ: MutableMapping[str, str] = os.environ, *, one_host: bool) -> None:
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


def set_nccl_interface(ip: str, environ: MutableMapping[str, str] = os.environ) -> None:
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

    def look() -> None:
        done = launch()
        while not done() and time.monotonic() - began < _BUSY_S:
            answered_at[0] = time.monotonic()
            time.sleep(_MAX_POLL_S)

    looking = in_thread(look, "axon_nb-device")
    while not wait([looking], _MAX_POLL_S).done:
        if time.monotonic() - answered_at[0] > _DEVICE_TIMEOUT_S:
            return f"it has not answered for {_DEVICE_TIMEOUT_S:g} s"
    error = looking.exception()
    return "" if error is None else str(error).partition("\n")[0]


def install_native_groups(
    root: Store, *, device: torch.device, timeout: timedelta, kind: BackendKind | None = None
) -> NativeGroups:
    """Make NCCL groups of this rank, or those of another `kind`, abortable and rebuildable from now on."""
    from axon_nb.engine.groups.native_calls import CallChecks  # Gloo's groups are checked where they start calls

    state = current_groups()
    checks = CallChecks(root, state)
    state.native = NativeGroups(
        kind or NCCL, root, device=device, timeout=timeout, abort=state.abort, before_connect=checks.begin
    )
    return state.native


def native_groups() -> NativeGroups | None:
    """Return the NCCL groups of this rank; None on a Gloo rank."""
    return current_groups().native


def _is_nccl(backend: Any) -> bool:
    return isinstance(backend, torch_api().nccl_classes())


def _connect_nccl(
    store: Store, group: dist.ProcessGroup, ranks: list[int], timeout: timedelta, device: torch.device
) -> Any:
    earlier = backend_of(group, device)
    options = earlier.options  # the group's own: NCCL's configuration, the priority of its stream
    options._timeout = timeout
    options.global_ranks_in_group = ranks
    options.group_name = group.group_name
    # The group's class, which is the same on all its ranks.
    backend = _make_nccl(type(earlier), store, group, options, device)
    torch_api().begin_sequence(backend)
    _start_nccl(backend, device)
    return backend


def _make_nccl(kind: Any, store: Store, group: dist.ProcessGroup, options: Any, device: torch.device) -> Any:
    if "device_id" in (kind.__init__.__doc__ or ""):
        # `ProcessGroupNCCL2` of 2.15 connects in its constructor, and ignores `device` unless it is passed.
        return kind(store, group.rank(), group.size(), options, device)
    return kind(store, group.rank(), group.size(), options)


def _abort_nccl(backend: Any) -> None:
    # It also raises if it took longer than the group's timeout; the caller's deadline is shorter.
    with contextlib.suppress(RuntimeError):
        backend.abort()


def _start_nccl(backend: Any, device: torch.device) -> None:
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
    owns=_is_nccl,
    start=_start_nccl,
    connect=_connect_nccl,
    abort=_abort_nccl,
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


def install_recoverable_groups(
    state: GroupsState,
    root: Store,
    *,
    rank: int,
    epoch: int = 0,
    shares_memory: bool = False,
    device: torch.device | None = None,
    max_bytes: int = 0,
) -> None:
    """Make every Gloo group that is created from now on a recoverable one.

    Args:
        state: What the groups share.
        root: Rendezvous store of the cluster.
        rank: This rank.
        epoch: How often the groups have been rebuilt.
        shares_memory: Whether groups communicate through shared memory instead of Gloo; all ranks are on one host then.
        device: Where this rank computes; None: on the CPU.
        max_bytes: Maximum size of the memory of one group; 0: the usual size.
    """
    set_current_groups(state)
    state.epoch = epoch
    if state.installed:
        return
    state.installed = True

    def create(options: Any, _: Any) -> RecoverableGroup:
        return RecoverableGroup(
            state,
            root,
            epoch=state.epoch,
            rank=options.group_rank,
            size=options.group_size,
            timeout=options.timeout or timedelta(minutes=30),
            name=options.group_id,
            global_rank=rank,
            # The default group has those from 0 on, however many they become.
            members=[] if options.group_id == "0" else list(options.global_ranks_in_group),
            shares_memory=shares_memory,
            rank_device=device or torch.device("cpu"),
            max_bytes=max_bytes,
        )

    dist.Backend.register_backend(_NAME, create, extended_api=True, devices=["cpu", "cuda"])
    torch_api().register_group_class(_NAME)
    original = c10d._new_process_group_helper

    def helper(size: int, group_rank: int, ranks: list[int], backend: Any, *args: Any, **kwargs: Any) -> Any:
        replaced, native = _is_replaced(str(backend).lower()), state.native
        name = args[1] if len(args) > 1 else kwargs.get("group_name", "")
        state.creating = (str(name), list(ranks), time.monotonic_ns()) if ranks else None
        try:
            group, store = original(
                size, group_rank, ranks, dist.Backend(_NAME) if replaced else backend, *args, **kwargs
            )
            if native is not None and not state.skips_rendezvous:
                native.connect(group, state.epoch)
        finally:
            state.creating = None
        forget_equal_meshes()
        if isinstance(group, RecoverableGroup):
            # What `dist.get_backend` returns and scripts compare with.
            c10d._world.pg_map[group] = (dist.Backend("gloo"), store)
        return group, store

    c10d._new_process_group_helper = helper
    c10d.split_group = dist.split_group = _split_group


def _split_group(
    parent_pg: Any = None,
    split_ranks: Sequence[Sequence[int]] = (),
    timeout: timedelta | None = None,
    *,
    group_desc: str | None = None,
    backend: Any = None,
    **options: Any,
) -> Any:
    """Create what `dist.split_group` splits from a group's connection; here each group connects by itself.

    torch splits in C++, where it finds nothing of ours, and no group that it makes there could be rebuilt. Its names
    differ between ranks that are in different numbers of groups.
    """
    parent = parent_pg or c10d._get_default_group()
    own = next((list(ranks) for ranks in split_ranks if dist.get_rank(parent) in ranks), None)
    if own is None:
        return dist.GroupMember.NON_GROUP_MEMBER
    if own != sorted(own) and not str(group_desc).startswith(_OF_PIPELINES):
        raise UsageError(f"split_group: list the ranks of a group in ascending order; got {own}.")
    members = [dist.get_global_rank(parent, rank) for rank in own]
    begin, taken = f"{parent.group_name}:{group_desc}:{members}:", {group.group_name for group in c10d._world.pg_names}
    name = next(name for number in itertools.count() if (name := f"{begin}{number}") not in taken)
    options |= {"timeout": timeout, "group_desc": group_desc, "backend": backend or dist.get_backend(parent)}
    with named_group(name):
        return dist.new_group(members, use_local_synchronization=True, **options)


def _is_replaced(backend: str) -> bool:
    """Whether a group of this backend becomes a recoverable one.

    For a mesh of CUDA devices in a Gloo world, torch asks for NCCL beside Gloo. Ranks of such a world may share a card,
    which NCCL refuses; a recoverable group takes CUDA tensors, too.
    """
    return backend in _REPLACED or (backend == _MIXED and native_groups() is None)


def forget_equal_meshes() -> None:
    """Clear DTensor's cache of placements, which takes an earlier mesh for an equal one with other groups.

    A model that is built again would communicate in groups of the earlier mesh. After a repair only some ranks have
    that mesh in their cache: they would wait for the others in another group. Clears the cache of the calling thread;
    torch keeps one per thread, and runs the backward pass on CUDA in another one.
    """
    # Whatever makes a DTensor imports torch._dynamo. To import it here would cost each rank a second when it starts.
    if "torch.distributed.tensor" in sys.modules and "torch._dynamo" in sys.modules:
        with contextlib.suppress(ImportError, AttributeError):
            torch_api().forget_placements()


@contextlib.contextmanager
def named_group(name: str) -> Iterator[None]:
    """Give this name to the group that `new_group` creates next.

    torch names a group that only its members create by the number of groups on the rank. If ranks have different
    numbers of groups, they would wait for each other under different names.
    """
    original: Any = c10d._process_group_name
    chosen: Any = name  # a NewType from torch 2.9 on
    c10d._process_group_name = lambda ranks, use_hashed_name: chosen
    try:
        yield
    finally:
        c10d._process_group_name = original


def all_groups() -> list[RecoverableGroup]:
    """Return the recoverable groups of this rank by name: in the same order on all ranks that share them."""
    groups = [group for group in list(c10d._world.pg_names) if isinstance(group, RecoverableGroup)]
    return sorted(groups, key=lambda group: (len(group.group_name), group.group_name))


def rebuildable_groups() -> list[Any]:
    """Return the groups of this rank that recovery rebuilds: recoverable ones, then those of NCCL; see `all_groups`."""
    native = native_groups()
    return [*all_groups(), *(native.all() if native is not None else [])]


def init_default_group(
    backend: str,
    *,
    store: Store,
    rank: int,
    world_size: int,
    device: torch.device,
    timeout_s: float,
    epoch: int = 0,
    recoverable: bool,
    kind: BackendKind = NCCL,
    max_bytes: int = 0,
    state: GroupsState | None = None,
) -> None:
    """Join the default group; collective over all ranks.

    Args:
        backend: ``shm``, ``gloo`` or ``nccl``. The first is for recoverable groups.
        store: Rendezvous store that all ranks can reach.
        rank: This rank.
        world_size: Number of ranks.
        device: Where this rank computes.
        timeout_s: Timeout of every collective in seconds, also in groups created later without a `timeout=`.
        epoch: How often the groups have been rebuilt.
        recoverable: Whether groups are rebuilt after a failure; otherwise they are torch's own, with their timeout.
        kind: The groups of an ``nccl`` world.
        max_bytes: Maximum size of the memory that one group shares; 0: the usual size.
        state: What the groups share; None: what `current_groups` returns.
    """
    timeout, state = timedelta(seconds=timeout_s), state or current_groups()
    _set_default_timeout(timeout)
    if recoverable:
        install_recoverable_groups(
            state, store, rank=rank, epoch=epoch, shares_memory=backend == "shm", device=device, max_bytes=max_bytes
        )
        if backend == "nccl":
            install_native_groups(store, device=device, timeout=timeout, kind=kind)
            install_fence(state.abort)
            # The device is not bound to the group; see `swap_backend`. The rank has set its current device.
            warnings.filterwarnings("ignore", message=r"barrier\(\): using the device under current context")
    # A replacement connects as the other ranks do: in `recovery.join_groups`, all groups in order.
    with state.without_rendezvous() if epoch else contextlib.nullcontext():
        dist.init_process_group(
            kind.torch_name if backend == "nccl" else "gloo",
            store=PrefixStore(f"join{epoch}/", store),  # a rank that joins later finds no keys of an earlier epoch
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )


def _set_default_timeout(timeout: timedelta) -> None:
    """Replace torch's 30 minutes (10 on NCCL) for groups created without a `timeout=`."""
    vars(dist.distributed_c10d).update(default_pg_timeout=timeout, default_pg_nccl_timeout=timeout)
