"""What ranks exchange before each collective: a digest of the call. It finds mismatches and serves joined ranks.

A digest of 0 says that the rank has joined. A joined rank takes part in reductions with zeros, as in Horovod.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from axon_nb.comm import all_gather, all_reduce
from axon_nb.comm.group import rank_device, resolve
from axon_nb.compat.horovod.errors import HorovodInternalError
from axon_nb.compat.horovod.world import State, current


class Call(NamedTuple):
    """What all ranks must pass alike."""

    kind: str
    """Function of Horovod, such as ``allreduce``."""
    name: str | None
    items: tuple[str, ...]
    """Operation, dtype and shape of each tensor, in words."""
    buffers: tuple[tuple[int, torch.dtype, str], ...] = ()
    """Number of elements, dtype and device type of what is summed; empty if joined ranks cannot take part."""

    @property
    def title(self) -> str:
        """The call as the user wrote it."""
        return f"hvd.{self.kind}" if self.name is None else f"hvd.{self.kind} {self.name!r}"


def describe(tensor: torch.Tensor, *, any_rows: bool = False) -> str:
    """Describe dtype and shape; with `any_rows` without the size of dim 0, which may differ between ranks."""
    shape = str(tuple(tensor.shape))
    if any_rows:
        shape = f"({', '.join(['any', *map(str, tensor.shape[1:])])})"
    return f"{tensor.dtype} of shape {shape}"


def agree(call: Call) -> None:
    """Ensure that all ranks that have not joined make the same call; ranks that have joined follow.

    Raises:
        NotInitializedError: `hvd.init()` was not called.
        HorovodInternalError: Ranks call differently, or a rank has joined and only `allreduce` works.
    """
    state = current()
    digests = _exchange(state, int.from_bytes(hashlib.blake2b(repr(call).encode(), digest_size=7).digest()) + 1)
    if len(set(digests) - {0}) > 1:
        calls: list[Any] = [None] * len(digests)
        dist.all_gather_object(calls, call)
        raise HorovodInternalError(_mismatch({rank: each for rank, each in enumerate(calls) if each is not None}))
    joined = [rank for rank, digest in enumerate(digests) if digest == 0]
    if joined:
        dist.broadcast_object_list([call], src=state.present[0])
        if not call.buffers:
            raise HorovodInternalError(
                f"{call.title}: rank {joined[0]} called hvd.join(), and only hvd.allreduce works then."
            )


def join() -> int:
    """Wait until all ranks have called this; meanwhile take part in `allreduce` and `step` of the others with zeros.

    Returns:
        The rank that joined last; the highest of several.

    Raises:
        NotInitializedError: `hvd.init()` was not called.
    """
    state = current()
    while True:
        last = state.present[-1]
        digests = _exchange(state, 0)
        if not any(digests):
            state.present = list(range(len(digests)))
            return last
        if len(set(digests) - {0}) > 1:
            dist.all_gather_object([None] * len(digests), None)
            continue
        calls: list[Any] = [None]
        dist.broadcast_object_list(calls, src=state.present[0])
        sum_buffers([torch.zeros(n, dtype=dtype, device=device) for n, dtype, device in calls[0].buffers])


def sum_buffers(buffers: Iterable[torch.Tensor]) -> None:
    """Sum flat tensors over all ranks, in place."""
    for handle in [all_reduce(buffer, async_op=True) for buffer in buffers]:
        handle.wait()


def _exchange(state: State, digest: int) -> list[int]:
    header = torch.tensor([digest], device=rank_device(resolve(None)))
    digests: list[int] = all_gather(header).tolist()
    if any(digests):
        state.present = [rank for rank, each in enumerate(digests) if each]
    return digests


def _mismatch(calls: dict[int, Call]) -> str:
    """Say what ranks passed where their calls differ first; of ranks that passed the same, only the first is named."""
    titles = {call.title: rank for rank, call in reversed(calls.items())}
    if len(titles) > 1:
        lines = ", ".join(f"rank {rank} called {title}" for title, rank in sorted(titles.items(), key=lambda x: x[1]))
        return f"Ranks call Horovod differently: {lines}. Make the same calls in the same order on every rank."
    for items in zip_longest(*(call.items for call in calls.values()), fillvalue="nothing"):
        passed = {item: rank for rank, item in reversed(list(zip(calls, items, strict=True)))}
        if len(passed) > 1:
            break
    lines = ", ".join(f"rank {rank} passed {item}" for item, rank in sorted(passed.items(), key=lambda x: x[1]))
    return f"{next(iter(titles))}: {lines}; pass the same on every rank."
