"""A world of several ranks inside this process, for notebooks without a cluster, teaching and tests."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from axon_nb.comm import mock
from axon_nb.comm.errors import CommError, InvalidArgumentError, InvalidRankError
from axon_nb.comm.group import Backend, GroupInfo, ProcessGroup, validate_ranks
from axon_nb.records.hooks import missing_hooks
from axon_nb.torch_api import torch_api

_active: list[_MockRun] = []


class MockWorld:
    """Several ranks that run in this process, one at a time.

    Args:
        world_size: Number of ranks.
        view: Creates, on each rank, the first argument of the rank's function; `World.mock` passes a World.
        synchronous_sends: Whether a send completes only when its receiver asks for it, as for large messages on real
            ranks; otherwise sends are buffered, which hides deadlocks of ranks that all send first.

    Raises:
        InvalidRankError: `world_size` is below 1.
    """

    def __init__(self, world_size: int = 1, *, view: Callable[[], Any], synchronous_sends: bool = False) -> None:
        if world_size < 1:
            raise InvalidRankError(f"world_size must be at least 1; got {world_size}.")
        self._size = world_size
        self._view = view
        self._synchronous_sends = synchronous_sends

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run `function(world, *args, **kwargs)` on every rank and return the results in rank order.

        Each rank has its own torch.distributed (default group and subgroups, so DDP, FSDP2, tensor parallelism and
        pipelines work) and its own random number generators, which start in the caller's state. Arguments are deep
        copies, as if sent to another process. One rank runs at a time, in an order that depends on the program alone,
        so every run gives the same bits.

        Raises:
            CommError: `function` is not callable, or a mock world is already running.
            BaseException: the first rank's failure; a note names the rank.
            DeadlockError: no rank can continue.
        """
        if not callable(function):
            raise InvalidArgumentError(f"run() needs a function that takes the world; got {function!r}.")
        if _active:
            raise CommError("A mock world is already running; its ranks cannot start another one.")
        if absent := missing_hooks("comm.mock_worlds"):
            raise CommError(f"Mock worlds need {', '.join(absent)}, which torch {torch.__version__} does not have.")
        run = _MockRun(self._size, self._synchronous_sends)
        _active.append(run)
        try:
            copies = [copy.deepcopy((args, kwargs)) for _ in range(self._size)]

            def as_rank(rank: int) -> Any:
                own_args, own_kwargs = copies[rank]
                return run.as_rank(rank, lambda: function(self._view(), *own_args, **own_kwargs))

            return run.scheduler.run(as_rank)
        finally:
            _active.clear()
            mock.set_thread_isolation(False)

    def create(self) -> list[ProcessGroup]:
        """Return one group per rank, all driven by the caller: make each call on every group with `async_op=True`."""
        return [ProcessGroup.from_backend(backend) for backend in mock.MockBackend.create_world(self._size)]

    def default_group(self) -> ProcessGroup:
        """Return the group of a world of one rank.

        Raises:
            CommError: the world has several ranks.
        """
        self._require_single_rank("default_group()")
        return ProcessGroup.mock()

    def rank(self) -> int:
        """Return 0, the only rank of a world of one rank.

        Raises:
            CommError: the world has several ranks.
        """
        self._require_single_rank("rank()")
        return 0

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self._size

    def new_group(self, ranks: Any) -> ProcessGroup:
        """Return a subgroup as a non-member sees it: its ranks can be queried."""
        return ProcessGroup.from_info(None, GroupInfo(validate_ranks(ranks, self._size), Backend.MOCK))

    def _require_single_rank(self, what: str) -> None:
        if self._size > 1:
            raise CommError(f"{what}: call it on a rank, inside `World.mock({self._size}).run(fn)`.")

    def __repr__(self) -> str:
        return f"World.mock({self._size})"


class _MockRun:
    """One run of one world, with the hubs that connect its ranks' groups."""

    def __init__(self, size: int, synchronous_sends: bool) -> None:
        self.size = size
        self._synchronous_sends = synchronous_sends
        self.scheduler = mock.TurnScheduler(size)
        self._hubs: dict[str, mock.Hub] = {}
        self._store = HashStore()
        _register()
        mock.set_thread_isolation(True)
        torch_api().prepare_threads()

    def make_group(self, name: str, ranks: tuple[int, ...], rank: int) -> mock.MockGroup:
        """Return one rank's handle on the group called `name`."""
        hub = self._hubs.setdefault(name, mock.Hub(ranks))
        return mock.MockGroup(hub, rank, self.scheduler, name, synchronous_sends=self._synchronous_sends)

    def as_rank(self, rank: int, function: Callable[[], Any]) -> Any:
        """Run `function` as one rank, in that rank's thread."""
        torch.autograd.set_multithreading_enabled(False).__enter__()  # run backward in this rank's thread
        dist.init_process_group(
            mock.NAME, store=self._store, rank=rank, world_size=self.size, timeout=timedelta(seconds=60)
        )
        try:
            return function()
        except Exception as error:
            error.add_note(f"raised on rank {rank} of {self.size} of a mock world")
            raise


def _register() -> None:
    if mock.NAME in dist.Backend.backend_list:
        return

    def create(options: Any, _: Any) -> mock.MockGroup:
        run = _active[0]
        ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        return run.make_group(options.group_id, ranks, options.group_rank)

    dist.Backend.register_backend(mock.NAME, create, extended_api=True, devices=["cpu"])
    torch_api().register_group_class(mock.NAME)
