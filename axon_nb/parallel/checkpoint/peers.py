"""The ranks that save and load together, or one process alone: exchange of objects and of outcomes."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from axon_nb.comm.group import GroupLike, ProcessGroup, resolve
from axon_nb.parallel.checkpoint.errors import CheckpointError

Failure = tuple[CheckpointError | None, str] | None


class Peers:
    """Ranks of a group that all make the same calls.

    Args:
        group: The group; None: all ranks, or this process alone if there is no world.
    """

    def __init__(self, group: GroupLike | Any = None) -> None:
        single = group is None and not dist.is_initialized()
        self._group: ProcessGroup | None = None if single else resolve(group)

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return 0 if self._group is None else self._group.rank()

    @property
    def size(self) -> int:
        """Number of ranks."""
        return 1 if self._group is None else self._group.size()

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, on all of them. Collective."""
        if self._group is None:
            return [value]
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, value, group=self._group.torch_group)
        return everyone

    def run_on_first(self, function: Callable[[], Any], *, error: type[CheckpointError], what: str) -> Any:
        """Run `function` on rank 0 and return its result on all ranks. Collective.

        Raises:
            CheckpointError: it failed; raised on all ranks. Other exceptions are converted to `error`.
        """
        outcome = [_attempt(function) if self.rank == 0 else None]
        if self._group is not None:
            dist.broadcast_object_list(outcome, self._group.ranks[0], group=self._group.torch_group)
        assert outcome[0] is not None
        value, failure = outcome[0]
        _raise_first([failure], error, what)
        return value

    def run_on_all(self, function: Callable[[], Any], *, error: type[CheckpointError], what: str) -> list[Any]:
        """Run `function` on every rank and return all results on all ranks. Collective.

        Raises:
            CheckpointError: it failed on a rank; raised on all ranks. Other exceptions are converted to `error`.
        """
        outcomes = self.gather(_attempt(function))
        _raise_first([failure for _, failure in outcomes], error, what)
        return [value for value, _ in outcomes]


def _attempt(function: Callable[[], Any]) -> tuple[Any, Failure]:
    try:
        return function(), None
    except CheckpointError as error:
        return None, (error, "")
    except Exception as error:
        return None, (None, describe(error))


def describe(error: BaseException) -> str:
    """Describe an error by the underlying OSError if there is one: torch may report only a consequence of it."""
    shown: BaseException | None = error
    while shown is not None and not isinstance(shown, OSError):
        shown = shown.__cause__ or shown.__context__
    shown = shown or error
    where = traceback.extract_tb(shown.__traceback__)[-1:]
    place = "".join(f" ({Path(frame.filename).name}:{frame.lineno})" for frame in where)
    return f"{type(shown).__name__}: {shown}{place}"


def _raise_first(failures: list[Failure], kind: type[CheckpointError], what: str) -> None:
    for rank, failure in enumerate(failures):
        if failure is not None:
            error, text = failure
            raise error if error is not None else kind(f"{what} on rank {rank}: {text}")
