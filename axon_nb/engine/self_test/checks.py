"""The checks with two ranks: each does on real Gloo groups what a failing cell needs, and checks the result.

Wrappers, such as DDP, must continue after an aborted step with the same weights, bit for bit.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore, PrefixStore

from axon_nb.engine.groups import recovery
from axon_nb.engine.groups.abort import AbortedError, swap_backend
from axon_nb.engine.groups.creation import all_groups, init_default_group
from axon_nb.engine.groups.gloo import GlooTransport
from axon_nb.engine.groups.state import current_groups
from axon_nb.engine.self_test.runner import CheckProcess
from axon_nb.errors import UsageError
from axon_nb.records.protocol.recovery import GroupRecord
from axon_nb.records.protocol.wire import decode, encode

_CPU = torch.device("cpu")
_TIMEOUT_S = 20.0
_Step = Callable[[int], None]


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


def _train_through_abort(process: CheckProcess, make: Callable[[], _Step], weights: Callable[[], Any]) -> None:
    """Check that steps 0, 1, 2, with step 1 aborted on rank 0 and repeated, equal undisturbed ones bit for bit.

    Args:
        process: This process.
        make: Creates a fresh model and returns its step, which takes the step's number.
        weights: Returns the parameters of the model created last.
    """
    step = make()
    for number in range(3):
        step(number)
    expected = weights()
    step = make()
    step(0)
    if process.rank == 0:
        with aborted_when_waiting():
            step(1)
    else:
        with contextlib.suppress(AbortedError, RuntimeError):
            recovery.abort(again=False)
    recover_groups()
    step(1)
    step(2)
    for actual, undisturbed in zip(weights(), expected, strict=True):
        if not torch.equal(actual, undisturbed):
            raise AssertionError("the repeated step gave different weights")


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def _data(number: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))


def _check_wrapper_reset(process: CheckProcess, wrap: Callable[[nn.Sequential], nn.Module]) -> None:
    join(process)
    models: list[nn.Module] = []

    def make() -> _Step:
        model = wrap(_layers())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        models[:] = [model]

        def step(number: int) -> None:
            optimizer.zero_grad()
            model(_data(number)).square().mean().backward()
            optimizer.step()

        return step

    def weights() -> list[torch.Tensor]:
        local: list[Any] = [getattr(p, "to_local", lambda p=p: p)() for p in models[0].parameters()]
        return [tensor.detach().clone() for tensor in local]

    _train_through_abort(process, make, weights)


def ddp_reset(process: CheckProcess) -> None:
    """Continue training a DDP model after a step in which one rank waited for the other."""
    _check_wrapper_reset(process, nn.parallel.DistributedDataParallel)


def fsdp2_reset(process: CheckProcess) -> None:
    """Continue training an FSDP2 model after such a step."""
    from torch.distributed.fsdp import fully_shard

    def wrap(model: nn.Sequential) -> nn.Module:
        for module in (model[0], model[2], model):
            fully_shard(module)
        return model

    _check_wrapper_reset(process, wrap)


def pipeline_reset(process: CheckProcess) -> None:
    """Continue training a pipeline of two stages after such a step."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    join(process)
    modules: list[nn.Module] = []

    def make() -> _Step:
        torch.manual_seed(process.rank)
        module = nn.Linear(8, 8)
        modules[:] = [module]
        stage = PipelineStage(module, process.rank, 2, _CPU)
        schedule: Any = Schedule1F1B(stage, 4, loss_fn=lambda output, target: (output - target).square().mean())
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

        def step(number: int) -> None:
            generator = torch.Generator().manual_seed(number)
            inputs, target = (torch.randn(8, 8, generator=generator) for _ in range(2))
            optimizer.zero_grad()
            if process.rank == 0:
                schedule.step(inputs)
            else:
                schedule.step(target=target)
            optimizer.step()

        return step

    _train_through_abort(process, make, lambda: [p.detach().clone() for p in modules[0].parameters()])
