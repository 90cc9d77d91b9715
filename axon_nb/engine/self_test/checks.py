"""The checks with two ranks: each does on real Gloo groups what a failing cell needs, and checks the result."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore

from axon_nb.engine.groups import recovery
from axon_nb.engine.groups.abort import AbortedError
from axon_nb.engine.groups.gloo import GlooTransport
from axon_nb.engine.groups.install import all_groups, init_default_group
from axon_nb.engine.groups.native import swap_backend
from axon_nb.engine.groups.state import current_groups
from axon_nb.engine.self_test.process import CheckProcess
from axon_nb.errors import UsageError
from axon_nb.records.protocol.recovery import GroupRecord
from axon_nb.records.protocol.wire import decode, encode

_CPU = torch.device("cpu")
_TIMEOUT_S = 20.0


class _Store(FileStore):
    """The store of one check, with the folder in which the ranks can share files."""

    folder: Path


def _store(process: CheckProcess) -> _Store:
    store = _Store(str(process.folder / "store"), -1)
    store.set_timeout(timedelta(seconds=_TIMEOUT_S))
    store.folder = process.folder
    return store


def join(process: CheckProcess, *, epoch: int = 0, backend: str = "gloo") -> _Store:
    """Join the default group."""
    torch.set_num_threads(1)
    store = _store(process)
    init_default_group(
        backend,
        store=store,
        rank=process.rank,
        world_size=process.num_ranks,
        device=_CPU,
        timeout_s=_TIMEOUT_S,
        epoch=epoch,
        recoverable=True,
    )
    return store


@contextlib.contextmanager
def aborted_when_waiting() -> Iterator[None]:
    """Abort this rank as soon as it waits in a group; if the body completes, raise AssertionError."""
    finished = threading.Event()

    def abort() -> None:
        with contextlib.suppress(TimeoutError):
            CheckProcess.wait_until(
                lambda: finished.is_set() or any(call.waiting_thread for call in current_groups().calls.pending()),
                "no wait",
            )
            if not finished.is_set():
                recovery.abort(again=False)

    thread = threading.Thread(target=abort)
    thread.start()
    try:
        yield
    except (AbortedError, RuntimeError) as error:
        if "abort" not in str(error).lower() and "lost a peer" not in str(error):
            raise
    else:
        raise AssertionError("the wait was not aborted")
    finally:
        finished.set()
        thread.join()


def _expect_sum(group: Any = None) -> None:
    tensor = torch.full((8,), dist.get_rank() + 1.0)
    dist.all_reduce(tensor, group=group)
    if not torch.equal(tensor, torch.full((8,), 3.0)):
        raise AssertionError(f"all_reduce gave {tensor.tolist()}")


def _wait_forever(process: CheckProcess) -> None:
    """Make one rank wait in a collective and the other in a receive; neither can complete."""
    with aborted_when_waiting():
        if process.rank == 0:
            dist.all_reduce(torch.ones(8))
        else:
            dist.recv(torch.ones(8), 0)


def recover_groups(*, replaced: bool = False) -> None:
    """Rebuild the groups; raise AssertionError if a wrapper was not reset."""
    if not_reset := recovery.recover(1, replaced=replaced).not_reset:
        raise AssertionError(not_reset[0])


def release(process: CheckProcess) -> None:
    """Abort a collective and a receive that have no counterpart, from another thread."""
    join(process)
    _expect_sum()
    _wait_forever(process)


def rebuild(process: CheckProcess) -> None:
    """Communicate on the same group objects after an abort: on the default group and on a subgroup."""
    join(process)
    _continue_after_abort(process)


def shared_memory(process: CheckProcess) -> None:
    """Do the same on groups that communicate through shared memory."""
    join(process, backend="shm")
    _continue_after_abort(process)


def _continue_after_abort(process: CheckProcess) -> None:
    world, pair = dist.group.WORLD, dist.new_group([0, 1])
    _expect_sum(pair)  # both are connected: an abort closes all groups, and would fail the peer's `new_group`
    _wait_forever(process)
    recover_groups()
    if dist.group.WORLD is not world:
        raise AssertionError("the default group is a different object")
    _expect_sum()
    _expect_sum(pair)
    _expect_sum(dist.new_group([0, 1]))


def repair(process: CheckProcess) -> None:
    """Let rank 1 die, and a replacement take its rank in the default group and in a subgroup."""
    if process.is_replacement:
        groups = decode(tuple[GroupRecord, ...], json.loads(process.wait_for("groups", 0)))
        join(process, epoch=1)
        recovery.join_groups(groups, epoch=1)
        recovery.sync_group_count()
    else:
        join(process)
        pair = dist.new_group([0, 1])
        _expect_sum(pair)
        if process.rank == 1:
            process.die()
        with aborted_when_waiting():
            dist.all_reduce(torch.ones(8))
        process.note("groups", json.dumps(encode(recovery.list_groups(), list[GroupRecord])))
        recover_groups(replaced=True)
    _expect_sum()
    for group in all_groups():
        _expect_sum(group)


def size_check(process: CheckProcess) -> None:
    """Pass tensors of different sizes on two ranks: one rank must raise before it sends anything."""
    join(process)
    _expect_sum()
    refused = ""
    try:
        with aborted_when_waiting():
            dist.all_reduce(torch.ones(4 + process.rank))
    except UsageError as error:
        refused = str(error)
    process.note("refused", refused)
    if not refused and not process.wait_for("refused", 1 - process.rank):
        raise AssertionError("sizes of 4 and 5 elements were not refused")


def backend_swap(process: CheckProcess) -> None:
    """Communicate on torch's own group through a backend that was swapped into it."""
    torch.set_num_threads(1)
    store = _store(process)
    dist.init_process_group("gloo", store=PrefixStore("default/", store), rank=process.rank, world_size=2)
    _expect_sum()
    timeout = timedelta(seconds=_TIMEOUT_S)
    gloo, fresh_store = GlooTransport(), PrefixStore("fresh/", store)
    fresh = gloo.connect(fresh_store, process.rank, 2, timeout=timeout, raise_if_cancelled=lambda: None)
    group: Any = dist.group.WORLD
    swap_backend(group, fresh, _CPU)
    if group._get_backend(_CPU) is not fresh:
        raise AssertionError("the group still uses its old backend")
    _expect_sum()
