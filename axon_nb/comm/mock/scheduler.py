"""Ranks of a mock world as threads: one runs at a time, until it must wait, with its own torch.distributed state.

The order depends on the program alone, so every run gives the same bits, and a deadlock is detected at once.

torch keeps its groups in a module-level object and in a C++ registry. The object is swapped whenever another rank runs;
the registry has a mode in which each thread has its own. The register lists these private hooks as `comm.mock_worlds`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from msgspec import Struct, field
from torch._C import _distributed_c10d as c_api

from axon_nb.comm.errors import DeadlockError
from axon_nb.random_states import random_states, set_random_states
from axon_nb.records.ranks import name_ranks
from axon_nb.torch_api import torch_api

_POLL_S = 0.05
c10d = dist.distributed_c10d


class RankAborted(BaseException):
    """Raised in a rank's thread because another rank failed. Not an `Exception`, so user code does not swallow it."""


class _RankState(Struct):
    """The state of one rank's thread."""

    may_run: threading.Event = field(default_factory=threading.Event)
    ready: Callable[[], bool] | None = None
    """Whether the rank can continue; None while it is not waiting."""
    waiting_in: Callable[[], str] = str
    finished: bool = False
    result: Any = None
    error: BaseException | None = None


class TurnScheduler:
    """Runs functions as ranks, one thread per rank.

    Args:
        num_ranks: How many.
    """

    def __init__(self, num_ranks: int) -> None:
        self._contexts = [_RankContext() for _ in range(num_ranks)]
        self._states = [_RankState() for _ in range(num_ranks)]
        self._local = threading.local()
        self._all_finished = threading.Event()
        self._abort_cause: BaseException | None = None
        self.failed: list[int] = []
        """Ranks that raised, in the order in which they did."""

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """Run `function(rank)` on every rank and return the results in rank order.

        Raises:
            BaseException: the failure of the first rank that failed; the others are aborted.
        """
        threads = [
            threading.Thread(target=self._run_rank, args=(rank, function), name=f"axon_nb-mock-rank{rank}", daemon=True)
            for rank in range(len(self._states))
        ]
        for thread in threads:
            thread.start()
        self._states[0].may_run.set()
        try:
            while not self._all_finished.wait(_POLL_S):
                pass
        except BaseException as error:  # Ctrl-C: each rank aborts at its next communication
            self._abort_cause = error
            raise
        for thread in threads:
            thread.join()
        if self.failed:
            cause = self._states[self.failed[0]].error
            assert cause is not None
            raise cause
        return [state.result for state in self._states]

    def _run_rank(self, rank: int, function: Callable[[int], Any]) -> None:
        state = self._states[rank]
        self._local.rank = rank
        state.may_run.wait()
        self._contexts[rank].enter()
        try:
            if self._abort_cause is None:
                state.result = function(rank)
        except RankAborted:
            pass
        except BaseException as error:
            state.error = error
            self.failed.append(rank)
            self._abort_cause = error
        state.finished = True
        self._contexts[rank].leave()
        self._schedule_next(rank)

    @property
    def rank(self) -> int | None:
        """The rank that runs in this thread; None outside."""
        return getattr(self._local, "rank", None)

    def wait_for(self, ready: Callable[[], bool], waiting_in: Callable[[], str]) -> None:
        """Let other ranks run until `ready()`; call it on a rank's thread.

        Raises:
            DeadlockError: every other rank waits too or has finished.
            RankAborted: another rank failed.
        """
        rank = self.rank
        assert rank is not None
        state = self._states[rank]
        self._raise_if_aborted()
        if ready():
            return
        state.ready, state.waiting_in = ready, waiting_in
        state.may_run.clear()
        self._contexts[rank].leave()
        self._schedule_next(rank)
        state.may_run.wait()
        self._contexts[rank].enter()
        state.ready = None
        self._raise_if_aborted()
        if not ready():
            raise DeadlockError(self._describe_deadlock())

    def _raise_if_aborted(self) -> None:
        if self._abort_cause is not None:
            raise RankAborted

    def _schedule_next(self, rank: int) -> None:
        """Wake the next rank that can run."""
        count = len(self._states)
        order = [(rank + 1 + offset) % count for offset in range(count)]
        unfinished = [other for other in order if not self._states[other].finished]
        if not unfinished:
            self._all_finished.set()
            return
        for other in unfinished:
            state = self._states[other]
            if self._abort_cause is not None or state.ready is None or state.ready():
                state.may_run.set()
                return
        # Deadlock: the lowest rank raises, and its failure aborts the others.
        self._states[min(unfinished)].may_run.set()

    def _describe_deadlock(self) -> str:
        groups: dict[str, list[int]] = {}
        for rank, state in enumerate(self._states):
            groups.setdefault("finished" if state.finished else f"waiting in {state.waiting_in()}", []).append(rank)
        text = "; ".join(f"{name_ranks(on)} {'is' if len(on) == 1 else 'are'} {what}" for what, on in groups.items())
        return f"Deadlock: {text}. All ranks of a group must make the same calls in the same order."


def world_problems() -> list[str]:
    """Return the properties of torch's `_World` that ours lacks."""
    known = set(vars(_World()))
    needed = {name for name, value in vars(c10d._World).items() if isinstance(value, property)}
    return sorted(f"torch.distributed.distributed_c10d._World.{name}" for name in needed - known)


class _World:
    """Replaces torch's own `_World`, which reads module globals; this one holds all state itself."""

    def __init__(self) -> None:
        self.default_pg: Any = None
        self.pg_map: dict[Any, Any] = {}
        self.pg_names: dict[Any, str] = {}
        self.pg_group_ranks: dict[Any, dict[int, int]] = {}
        self.pg_backend_config: dict[Any, str] = {}
        self.group_count = 0
        self.tags_to_pg: dict[str, list[Any]] = {}
        self.pg_to_tag: dict[Any, str] = {}
        self.pg_coalesce_state: dict[Any, list[Any]] = {}
        self.comms: list[Any] = []
        self.pg_config_info: list[dict[str, Any]] = []
        vars(self).update({name: kind() for name, kind in torch_api().world_fields.items()})


class _RankContext:
    """The per-process state of one rank: torch's groups and the random number generators."""

    def __init__(self) -> None:
        self._world: Any = _World()
        self._random = random_states()
        self._caller_state: list[Any] = []

    def enter(self) -> None:
        """Install this rank's state."""
        self._caller_state = [c10d._world, random_states()]
        c10d._world = self._world
        set_random_states(self._random)

    def leave(self) -> None:
        """Save this rank's state and restore the previous one."""
        self._random = random_states()
        c10d._world, before = self._caller_state
        set_random_states(before)


def set_thread_isolation(on: bool) -> None:
    """Choose whether each thread has its own registry of groups."""
    c_api._set_thread_isolation_mode(on)  # type: ignore[attr-defined]
