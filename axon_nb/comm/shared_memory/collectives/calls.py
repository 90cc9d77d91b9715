"""The operations of c10d on tensors as calls of the collectives, in the order of the group, on any thread."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from axon_nb.comm.errors import TensorError
from axon_nb.comm.shared_memory.collectives import movement, reduction, uneven
from axon_nb.comm.shared_memory.collectives.arithmetic import Arithmetic
from axon_nb.comm.shared_memory.collectives.rounds import Rounds
from axon_nb.comm.shared_memory.collectives.staging import Staged, flat_buffer, scratch_buffer, stage, stage_all
from axon_nb.comm.shared_memory.segment.announcement import REDUCE_OPERATIONS, UNEVEN, fact_of
from axon_nb.comm.shared_memory.segment.errors import SharedMemoryTimeoutError

Tensor = torch.Tensor

_BLOCKING = frozenset(
    function.__code__
    for function in (getattr(call, "__wrapped__", call) for call in (dist.send, dist.recv))
    if hasattr(function, "__code__")
)


def is_waited_for() -> bool:
    """Whether the caller is `dist.send` or `dist.recv`, which wait for the message themselves."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(6):
        if frame is None:
            return False
        if frame.f_code in _BLOCKING:
            return True
        frame = frame.f_back
    return False


def _own_part(source: Staged, target: Staged) -> Any:
    """Return a block as a buffer; empty if it is small, or if writing to `target` changes it."""
    if source.size <= reduction.DIRECT_BYTES:
        return b""
    is_apart = source.address + source.size <= target.address or target.address + target.size <= source.address
    return flat_buffer(source) if is_apart else b""


class Calls:
    """The calls of one group.

    Args:
        rounds: The group's collectives.
    """

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._scratch = scratch_buffer(reduction.DIRECT_BYTES)

    def all_reduce(self, tensor: Tensor, number: int, sums: Arithmetic, line: int) -> None:
        """Reduce in place."""
        if tensor.is_sparse:
            self._sum_sparse(tensor, number, line)
            return
        rounds, staged = self._rounds, stage(tensor, writes=True)
        count, size = staged.count, staged.size
        rounds.begin(fact_of("all_reduce", count, dtype=tensor.dtype, reduce=number), line)
        if size <= reduction.DIRECT_BYTES and size <= rounds.layout.slot_bytes:
            reduction.all_reduce_small(rounds, staged.address, size=size, count=count, sums=sums, scratch=self._scratch)
        else:
            target, item = flat_buffer(staged), tensor.element_size()
            reduction.all_reduce(rounds, staged.address, target=target, count=count, item=item, sums=sums)
        staged.store()

    def _sum_sparse(self, tensor: Tensor, number: int, line: int) -> None:
        """Sum sparse tensors: each rank gathers all indices and values, and adds them in rank order."""
        if REDUCE_OPERATIONS[number] != "SUM":
            raise TensorError(f"Sparse tensors support only SUM; got {REDUCE_OPERATIONS[number]}.")
        ranks = range(self._rounds.size)
        local = tensor.detach().coalesce()
        indices, values = local.indices(), local.values()
        counts = torch.empty(len(ranks), dtype=torch.int64)
        self.all_gather_single(counts, torch.tensor([values.shape[0]]), line)
        longest = int(counts.max())
        gathered = []
        for part in (indices.t(), values):
            padded = part.new_zeros((longest, *part.shape[1:]))
            padded[: part.shape[0]] = part
            whole = part.new_empty((len(ranks), *padded.shape))
            self.all_gather_single(whole, padded, line)
            gathered.append(whole)
        with torch.no_grad():
            total = None
            for rank in ranks:
                count = int(counts[rank])
                item = torch.sparse_coo_tensor(
                    gathered[0][rank, :count].t(), gathered[1][rank, :count], tensor.shape, check_invariants=False
                )
                total = item if total is None else total + item
            assert total is not None
            tensor.copy_(total.coalesce())

    def broadcast(self, tensor: Tensor, root: int, line: int) -> None:
        """Copy the root's."""
        staged = stage(tensor, reads=self._rounds.rank == root)
        self._rounds.begin(fact_of("broadcast", staged.count, dtype=tensor.dtype, root=root), line)
        movement.broadcast(self._rounds, staged.address, staged.size, root)
        if self._rounds.rank != root:
            staged.store()

    def reduce(self, tensor: Tensor, number: int, sums: Arithmetic, root: int, line: int) -> None:
        """Reduce into the root's."""
        rounds = self._rounds
        staged = stage(tensor, writes=rounds.rank == root)
        rounds.begin(fact_of("reduce", staged.count, dtype=tensor.dtype, root=root, reduce=number), line)
        buffer = flat_buffer(staged) if rounds.rank == root else None
        item = tensor.element_size()
        reduction.reduce(rounds, staged.address, buffer=buffer, count=staged.count, item=item, sums=sums, root=root)
        if rounds.rank == root:
            staged.store()

    def all_gather(self, parts: Sequence[Tensor], tensor: Tensor, line: int) -> None:
        """Copy all to all."""
        staged, targets = stage(tensor), stage_all(list(parts), reads=False)
        self._rounds.begin(fact_of("all_gather", staged.count, dtype=tensor.dtype), line)
        movement.all_gather(self._rounds, staged.address, staged.size, [target.address for target in targets])
        for target in targets:
            target.store()

    def all_gather_single(self, output: Tensor, tensor: Tensor, line: int) -> None:
        """Gather the tensors of all ranks on all ranks, into one tensor."""
        staged, target = stage(tensor), stage(output, reads=False)
        size = staged.size
        self._rounds.begin(fact_of("all_gather", staged.count, dtype=tensor.dtype), line)
        places = (
            range(target.address, target.address + size * self._rounds.size, size) if size else [0] * self._rounds.size
        )
        movement.all_gather(self._rounds, staged.address, size, places)
        target.store()

    def gather(self, parts: Sequence[Tensor], tensor: Tensor, root: int, line: int) -> None:
        """Copy all to the root."""
        staged, targets = stage(tensor), stage_all(list(parts), reads=False)
        self._rounds.begin(fact_of("gather", staged.count, dtype=tensor.dtype, root=root), line)
        places = [target.address for target in targets] if targets else None
        movement.gather(self._rounds, staged.address, staged.size, places, root)
        for target in targets:
            target.store()

    def scatter(self, output: Tensor, parts: Sequence[Tensor], root: int, line: int) -> None:
        """Scatter the root's tensors, one per rank."""
        target, sources = stage(output, reads=False), stage_all(list(parts))
        self._rounds.begin(fact_of("scatter", target.count, dtype=output.dtype, root=root), line)
        places = [source.address for source in sources] if sources else None
        movement.scatter(self._rounds, places, target.size, target.address, root)
        target.store()

    def reduce_scatter(self, output: Tensor, parts: Sequence[Tensor], number: int, sums: Arithmetic, line: int) -> None:
        """Reduce the tensors for this rank; they may have another size than those for other ranks."""
        target, sources, rounds = stage(output, reads=False), stage_all(list(parts)), self._rounds
        places, counts = [source.address for source in sources], [source.count for source in sources]
        buffer, item, is_even = flat_buffer(target), output.element_size(), len(set(counts)) == 1
        count, root = (target.count, -1) if is_even else (sum(counts), UNEVEN)
        rounds.begin(fact_of("reduce_scatter", count, dtype=output.dtype, root=root, reduce=number), line)
        if is_even:
            own_part = _own_part(sources[rounds.rank], target)
            reduction.reduce_scatter(
                rounds, places, own_part=own_part, buffer=buffer, count=count, item=item, sums=sums
            )
        else:
            uneven.reduce_scatter(rounds, places, counts, buffer=buffer, item=item, sums=sums)
        target.store()

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, number: int, sums: Arithmetic, line: int) -> None:
        """Reduce this rank's part of one tensor."""
        target, source, rounds = stage(output, reads=False), stage(tensor), self._rounds
        rounds.begin(fact_of("reduce_scatter", target.count, dtype=output.dtype, reduce=number), line)
        places = [source.address + rank * target.size for rank in range(rounds.size)]
        buffer, item, start = flat_buffer(target), output.element_size(), rounds.rank * target.size
        own_part = _own_part(source, target)[start : start + target.size]
        reduction.reduce_scatter(
            rounds, places, own_part=own_part, buffer=buffer, count=target.count, item=item, sums=sums
        )
        target.store()

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], line: int) -> None:
        """Exchange tensors."""
        targets, sources = stage_all(list(outputs), reads=False), stage_all(list(inputs))
        self._rounds.begin(fact_of("all_to_all", 0, dtype=outputs[0].dtype), line)
        movement.all_to_all(
            self._rounds,
            [source.address for source in sources],
            [source.size for source in sources],
            [target.address for target in targets],
            [target.size for target in targets],
        )
        for target in targets:
            target.store()

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, taken: Sequence[int], sent: Sequence[int], line: int
    ) -> None:
        """Exchange parts of one tensor."""
        target, source = stage(output, reads=False), stage(tensor)
        self._rounds.begin(fact_of("all_to_all", 0, dtype=output.dtype), line)
        sources = [source.address + sum(sent[:rank]) for rank in range(len(sent))]
        targets = [target.address + sum(taken[:rank]) for rank in range(len(taken))]
        movement.all_to_all(self._rounds, sources, sent, targets, taken)
        target.store()

    def barrier(self, line: int) -> None:
        """Wait for all."""
        self._rounds.begin(fact_of("barrier", 0), line)
        movement.barrier(self._rounds)

    def monitored_barrier(self, seconds: float, line: int) -> None:
        """Wait for all ranks, or name those that do not arrive.

        Raises:
            SharedMemoryTimeoutError: ranks did not arrive in time.
        """
        rounds, started = self._rounds, time.monotonic()
        normal, rounds.timeout_s = rounds.timeout_s, seconds
        try:
            self.barrier(line)
        except SharedMemoryTimeoutError:
            missing = rounds.missing()
            raise SharedMemoryTimeoutError(
                f"monitored_barrier: {missing} did not arrive within {time.monotonic() - started:.1f} s"
            ) from None
        finally:
            rounds.timeout_s = normal
