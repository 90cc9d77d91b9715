"""A world of n ranks inside this process, for notebooks without a cluster, teaching and tests."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from axon_nb.comm.errors import CommError, InvalidRank
from axon_nb.comm.group import GroupFacts, ProcessGroup, checked_ranks
from axon_nb.comm.kinds import Backend
from axon_nb.comm.mock import NAME, Hub, MockBackend, MockGroup, RankContext, Turns, isolated_threads, missing
from axon_nb.torch_api import torch_api

__all__ = ["MockWorld"]

_active: list[_Run] = []


class MockWorld:
    """n ranks that take turns in this process.

    Args:
        n: Number of ranks.
        view: Makes what a rank's function gets as its first argument, on the rank; `World.mock(n)` gives it a World.

    Raises:
        InvalidRank: n is below 1.
    """

    def __init__(self, n: int = 1, *, view: Callable[[], Any]) -> None:
        if n < 1:
            raise InvalidRank(f"a world of {n} ranks: it has at least 1.")
        self._size = n
        self._view = view

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run `function(world, *args, **kwargs)` as every rank, and return the results in the order of ranks.

        Each rank has its own torch.distributed (default group and subgroups, so DDP, FSDP2, tensor parallelism and
        pipelines work) and its own random numbers, which all begin in the state of the caller's. Arguments are deep
        copies, as if they had been sent to a process. One rank runs at a time, in an order that only the program
        decides: the same bits every time.

        Raises:
            CommError: `function` cannot be called.
            BaseException: what the first rank to fail raised; a note says which.
            WorldStuck: no rank can go on.
        """
        if not callable(function):
            raise CommError(f"run({function!r}): give it a function of the world, which runs on each rank.")
        if _active:
            raise CommError("A mock world runs already, and its ranks cannot have one of their own.")
        if lost := missing():
            raise CommError(f"Mock worlds need {', '.join(lost)}, which torch {torch.__version__} does not have.")
        run = _Run(self._size)
        _active.append(run)
        try:
            copies = [copy.deepcopy((args, kwargs)) for _ in range(self._size)]

            def as_rank(rank: int) -> Any:
                own_args, own_kwargs = copies[rank]
                return run.as_rank(rank, lambda: function(self._view(), *own_args, **own_kwargs))

            return run.turns.run(as_rank)
        finally:
            _active.clear()
            run.end()

    def create(self) -> list[ProcessGroup]:
        """One group a rank, all driven by the caller: each call is made on every one, with `async_op=True`."""
        return [ProcessGroup.from_backend(backend) for backend in MockBackend.create_world(self._size)]

    def default_group(self) -> ProcessGroup:
        """The group of a world of one rank.

        Raises:
            CommError: it has more, and this is none of them.
        """
        self._only_one("default_group()")
        return ProcessGroup.mock()

    def rank(self) -> int:
        """0, in a world of one rank.

        Raises:
            CommError: it has more, and this is none of them.
        """
        self._only_one("rank()")
        return 0

    def world_size(self) -> int:
        """Number of ranks."""
        return self._size

    def new_group(self, ranks: Any) -> ProcessGroup:
        """A subgroup, as one who is no member sees it: it can be asked for its ranks."""
        return ProcessGroup.with_facts(None, GroupFacts(checked_ranks(ranks, self._size), Backend.MOCK))

    def _only_one(self, what: str) -> None:
        if self._size > 1:
            raise CommError(f"{what} of a mock world of {self._size}: ask within `World.mock({self._size}).run(fn)`.")

    def __repr__(self) -> str:
        return f"World.mock({self._size})"


class _Run:
    """One run of one world: the hubs in which its ranks' groups meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.turns = Turns([RankContext() for _ in range(size)])
        self._hubs: dict[str, Hub] = {}
        self._store = HashStore()
        _register()
        isolated_threads(True)
        torch_api().prepare_threads()

    def make_group(self, name: str, ranks: tuple[int, ...], rank: int) -> MockGroup:
        """One rank's end of the group called `name`."""
        hub = self._hubs.setdefault(name, Hub(ranks))
        return MockGroup(hub, rank, self.turns, name)

    def as_rank(self, rank: int, function: Callable[[], Any]) -> Any:
        """What a rank's thread does."""
        torch.autograd.set_multithreading_enabled(False).__enter__()  # backward stays in this rank's thread
        dist.init_process_group(NAME, store=self._store, rank=rank, world_size=self.size, timeout=timedelta(seconds=60))
        try:
            return function()
        except Exception as error:
            error.add_note(f"raised on rank {rank} of {self.size} of a mock world")
            raise

    def end(self) -> None:
        """Take the hooks away."""
        isolated_threads(False)


def _register() -> None:
    if NAME in dist.Backend.backend_list:
        return

    def create(options: Any, _: Any) -> MockGroup:
        run = _active[0]
        ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        return run.make_group(options.group_id, ranks, options.group_rank)

    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])
    torch_api().register_group_class(NAME)
