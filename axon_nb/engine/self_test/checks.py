"""The checks with two ranks: each does on real Gloo groups what a failing cell needs, and compares the result."""

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

from axon_nb.engine.groups import activity, recovery
from axon_nb.engine.groups.abort import Aborted, raise_if_aborted
from axon_nb.engine.groups.gloo import connect
from axon_nb.engine.groups.install import all_groups, form_default_group
from axon_nb.engine.groups.native import swap_backend
from axon_nb.engine.self_test.place import Place
from axon_nb.errors import UsageError
from axon_nb.records.protocol.recovery import GroupRecord
from axon_nb.records.protocol.wire import decode, encode

__all__ = [
    "backend_swap",
    "ddp_reset",
    "fsdp2_reset",
    "pipeline_reset",
    "rebuild",
    "release",
    "repair",
    "size_check",
]

_CPU = torch.device("cpu")
_LIMIT_S = 20.0


class _Store(FileStore):
    """The store of one check, beside which the ranks can share files."""

    folder: Path


def _store(place: Place) -> _Store:
    store = _Store(str(place.folder / "store"), -1)
    store.set_timeout(timedelta(seconds=_LIMIT_S))
    store.folder = place.folder
    return store


def _join(place: Place, *, epoch: int = 0) -> _Store:
    torch.set_num_threads(1)
    store = _store(place)
    form_default_group(
        "gloo",
        store=store,
        rank=place.rank,
        world_size=place.num_ranks,
        device=_CPU,
        timeout_s=_LIMIT_S,
        epoch=epoch,
        recoverable=True,
    )
    return store


@contextlib.contextmanager
def _aborted_when_waiting() -> Iterator[None]:
    """Within it this rank is aborted as soon as it waits in a group; it must be released by that.

    Raises:
        AssertionError: the code within came to its end.
    """
    over = threading.Event()

    def abort() -> None:
        with contextlib.suppress(TimeoutError):
            Place.wait_until(lambda: over.is_set() or any(call.waited_by for call in activity.pending()), "no wait")
            if not over.is_set():
                recovery.abort(again=False)

    thread = threading.Thread(target=abort)
    thread.start()
    try:
        yield
    except (Aborted, RuntimeError) as error:
        if "abort" not in str(error).lower() and "peer lost" not in str(error):
            raise
    else:
        raise AssertionError("the wait was not ended")
    finally:
        over.set()
        thread.join()


def _expect_sum(group: Any = None) -> None:
    tensor = torch.full((8,), dist.get_rank() + 1.0)
    dist.all_reduce(tensor, group=group)
    if not torch.equal(tensor, torch.full((8,), 3.0)):
        raise AssertionError(f"all_reduce gave {tensor.tolist()}")


def _wait_in_vain(place: Place) -> None:
    """One rank waits in a collective, the other in a receive; neither can end."""
    with _aborted_when_waiting():
        if place.rank == 0:
            dist.all_reduce(torch.ones(8))
        else:
            dist.recv(torch.ones(8), 0)


def _recover(*, replaced: bool = False) -> None:
    if not_reset := recovery.recover(1, replaced=replaced).not_reset:
        raise AssertionError(not_reset[0])


def release(place: Place) -> None:
    """A collective and a receive that nobody answers are ended from another thread."""
    _join(place)
    _expect_sum()
    _wait_in_vain(place)


def rebuild(place: Place) -> None:
    """After an abort the same group objects communicate again, the default one and a subgroup."""
    _join(place)
    world, own = dist.group.WORLD, dist.new_group([0, 1])
    _expect_sum(own)  # both are connected: an abort closes all groups, and would fail the peer's `new_group`
    _wait_in_vain(place)
    _recover()
    if dist.group.WORLD is not world:
        raise AssertionError("the default group is another object")
    _expect_sum()
    _expect_sum(own)
    _expect_sum(dist.new_group([0, 1]))


def repair(place: Place) -> None:
    """Rank 1 dies and a newcomer takes its rank in the default group and in a subgroup."""
    if place.newcomer:
        groups = decode(tuple[GroupRecord, ...], json.loads(place.wait_for("groups", 0)))
        _join(place, epoch=1)
        recovery.join_groups(groups, epoch=1)
        recovery.agree_on_names()
    else:
        _join(place)
        own = dist.new_group([0, 1])
        _expect_sum(own)
        if place.rank == 1:
            place.die()
        with _aborted_when_waiting():
            dist.all_reduce(torch.ones(8))
        place.note("groups", json.dumps(encode(recovery.registry(), list[GroupRecord])))
        _recover(replaced=True)
    _expect_sum()
    for group in all_groups():
        _expect_sum(group)


def _train_through_abort(place: Place, make: Callable[[], Callable[[int], None]], weights: Callable[[], Any]) -> None:
    """Steps 0, 1, 2 with step 1 aborted on rank 0 and run again must equal three undisturbed ones, bit for bit.

    Args:
        place: This process.
        make: Builds a fresh model and returns its step, which takes the step's number.
        weights: The parameters of the model that was built last.
    """
    step = make()
    for number in range(3):
        step(number)
    expected = weights()
    step = make()
    step(0)
    if place.rank == 0:
        with _aborted_when_waiting():
            step(1)
    else:
        with contextlib.suppress(Aborted, RuntimeError):
            recovery.abort(again=False)
    _recover()
    step(1)
    step(2)
    for found, wanted in zip(weights(), expected, strict=True):
        if not torch.equal(found, wanted):
            raise AssertionError("the step that was run again gave other weights")


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def _data(number: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))


def _wrapped_reset(place: Place, wrap: Callable[[nn.Sequential], nn.Module]) -> None:
    _join(place)
    made: list[nn.Module] = []

    def make() -> Callable[[int], None]:
        model = wrap(_layers())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        made[:] = [model]

        def step(number: int) -> None:
            optimizer.zero_grad()
            model(_data(number)).square().mean().backward()
            optimizer.step()

        return step

    def weights() -> list[torch.Tensor]:
        local: list[Any] = [getattr(p, "to_local", lambda p=p: p)() for p in made[0].parameters()]
        return [part.detach().clone() for part in local]

    _train_through_abort(place, make, weights)


def ddp_reset(place: Place) -> None:
    """A DDP model trains on after a step in which one rank waited for the other."""
    _wrapped_reset(place, nn.parallel.DistributedDataParallel)


def fsdp2_reset(place: Place) -> None:
    """An FSDP2 model does."""
    from torch.distributed.fsdp import fully_shard

    def wrap(model: nn.Sequential) -> nn.Module:
        for module in (model[0], model[2], model):
            fully_shard(module)
        return model

    _wrapped_reset(place, wrap)


def pipeline_reset(place: Place) -> None:
    """A pipeline of two stages does."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    _join(place)
    made: list[nn.Module] = []

    def make() -> Callable[[int], None]:
        torch.manual_seed(place.rank)
        module = nn.Linear(8, 8)
        made[:] = [module]
        stage = PipelineStage(module, place.rank, 2, _CPU)
        schedule: Any = Schedule1F1B(stage, 4, loss_fn=lambda output, target: (output - target).square().mean())
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

        def step(number: int) -> None:
            generator = torch.Generator().manual_seed(number)
            inputs, target = (torch.randn(8, 8, generator=generator) for _ in range(2))
            optimizer.zero_grad()
            if place.rank == 0:
                schedule.step(inputs)
            else:
                schedule.step(target=target)
            optimizer.step()

        return step

    _train_through_abort(place, make, lambda: [p.detach().clone() for p in made[0].parameters()])


def size_check(place: Place) -> None:
    """Of two ranks that bring tensors of different sizes, one raises before it sends anything."""
    _join(place)
    _expect_sum()
    refused = ""
    try:
        with _aborted_when_waiting():
            dist.all_reduce(torch.ones(4 + place.rank))
    except UsageError as error:
        refused = str(error)
    place.note("refused", refused)
    if not refused and not place.wait_for("refused", 1 - place.rank):
        raise AssertionError("sizes of 4 and 5 elements were not refused")


def backend_swap(place: Place) -> None:
    """Torch's own group communicates through a backend that was put under it."""
    torch.set_num_threads(1)
    store = _store(place)
    dist.init_process_group("gloo", store=PrefixStore("default/", store), rank=place.rank, world_size=2)
    _expect_sum()
    limit = timedelta(seconds=_LIMIT_S)
    fresh = connect(PrefixStore("fresh/", store), place.rank, 2, timeout=limit, give_up=raise_if_aborted)
    group: Any = dist.group.WORLD
    swap_backend(group, fresh, _CPU)
    if group._get_backend(_CPU) is not fresh:
        raise AssertionError("the group kept its backend")
    _expect_sum()
