"""The operations of c10d on tensors as calls of the collectives, in the order of the group, on any thread.

Tensors are given to them as addresses of contiguous CPU memory; other tensors are copied.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from axon_nb.comm.errors import TensorError, TensorMismatchError
from axon_nb.comm.shared_memory.collectives import algorithms
from axon_nb.comm.shared_memory.collectives.algorithms import Arithmetic
from axon_nb.comm.shared_memory.collectives.rounds import Rounds
from axon_nb.comm.shared_memory.segment.pages import REDUCE_OPERATIONS, UNEVEN, SharedMemoryTimeoutError, fact_of

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
    if source.size <= algorithms.DIRECT_BYTES:
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
        self._scratch = scratch_buffer(algorithms.DIRECT_BYTES)

    def all_reduce(self, tensor: Tensor, number: int, sums: Arithmetic, line: int) -> None:
        """Reduce in place."""
        if tensor.is_sparse:
            self._sum_sparse(tensor, number, line)
            return
        rounds, staged = self._rounds, stage(tensor, writes=True)
        count, size = staged.count, staged.size
        rounds.begin(fact_of("all_reduce", count, dtype=tensor.dtype, reduce=number), line)
        if size <= algorithms.DIRECT_BYTES and size <= rounds.layout.slot_bytes:
            algorithms.all_reduce_small(
                rounds, staged.address, size=size, count=count, sums=sums, scratch=self._scratch
            )
        else:
            target, item = flat_buffer(staged), tensor.element_size()
            algorithms.all_reduce(rounds, staged.address, target=target, count=count, item=item, sums=sums)
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
        algorithms.broadcast(self._rounds, staged.address, staged.size, root)
        if self._rounds.rank != root:
            staged.store()

    def reduce(self, tensor: Tensor, number: int, sums: Arithmetic, root: int, line: int) -> None:
        """Reduce into the root's."""
        rounds = self._rounds
        staged = stage(tensor, writes=rounds.rank == root)
        rounds.begin(fact_of("reduce", staged.count, dtype=tensor.dtype, root=root, reduce=number), line)
        buffer = flat_buffer(staged) if rounds.rank == root else None
        item = tensor.element_size()
        algorithms.reduce(rounds, staged.address, buffer=buffer, count=staged.count, item=item, sums=sums, root=root)
        if rounds.rank == root:
            staged.store()

    def all_gather(self, parts: Sequence[Tensor], tensor: Tensor, line: int, tag: int = 0) -> None:
        """Copy all to all; `tag` must be equal, too."""
        staged, targets = stage(tensor), stage_all(list(parts), reads=False)
        self._rounds.begin(fact_of("all_gather", staged.count, dtype=tensor.dtype, root=tag - 1), line)
        algorithms.all_gather(self._rounds, staged.address, staged.size, [target.address for target in targets])
        for target in targets:
            target.store()

    def all_gather_single(self, output: Tensor, tensor: Tensor, line: int, tag: int = 0) -> None:
        """Gather the tensors of all ranks on all ranks, into one tensor; `tag` must be equal, too."""
        staged, target = stage(tensor), stage(output, reads=False)
        size = staged.size
        self._rounds.begin(fact_of("all_gather", staged.count, dtype=tensor.dtype, root=tag - 1), line)
        places = (
            range(target.address, target.address + size * self._rounds.size, size) if size else [0] * self._rounds.size
        )
        algorithms.all_gather(self._rounds, staged.address, size, places)
        target.store()

    def gather(self, parts: Sequence[Tensor], tensor: Tensor, root: int, line: int) -> None:
        """Copy all to the root."""
        staged, targets = stage(tensor), stage_all(list(parts), reads=False)
        self._rounds.begin(fact_of("gather", staged.count, dtype=tensor.dtype, root=root), line)
        places = [target.address for target in targets] if targets else None
        algorithms.gather(self._rounds, staged.address, staged.size, places, root)
        for target in targets:
            target.store()

    def scatter(self, output: Tensor, parts: Sequence[Tensor], root: int, line: int) -> None:
        """Scatter the root's tensors, one per rank."""
        target, sources = stage(output, reads=False), stage_all(list(parts))
        self._rounds.begin(fact_of("scatter", target.count, dtype=output.dtype, root=root), line)
        places = [source.address for source in sources] if sources else None
        algorithms.scatter(self._rounds, places, target.size, target.address, root)
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
            algorithms.reduce_scatter(
                rounds, places, own_part=own_part, buffer=buffer, count=count, item=item, sums=sums
            )
        else:
            algorithms.reduce_scatter_uneven(rounds, places, counts, buffer=buffer, item=item, sums=sums)
        target.store()

    def reduce_scatter_single(
        self, output: Tensor, tensor: Tensor, number: int, sums: Arithmetic, line: int, *, tag: int = 0
    ) -> None:
        """Reduce this rank's part of one tensor; `tag` must be equal, too."""
        target, source, rounds = stage(output, reads=False), stage(tensor), self._rounds
        fact = fact_of("reduce_scatter", target.count, dtype=output.dtype, root=tag - 1, reduce=number)
        rounds.begin(fact, line)
        places = [source.address + rank * target.size for rank in range(rounds.size)]
        buffer, item, start = flat_buffer(target), output.element_size(), rounds.rank * target.size
        own_part = _own_part(source, target)[start : start + target.size]
        algorithms.reduce_scatter(
            rounds, places, own_part=own_part, buffer=buffer, count=target.count, item=item, sums=sums
        )
        target.store()

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], line: int) -> None:
        """Exchange tensors."""
        targets, sources = stage_all(list(outputs), reads=False), stage_all(list(inputs))
        self._rounds.begin(fact_of("all_to_all", 0, dtype=outputs[0].dtype), line)
        algorithms.all_to_all(
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
        algorithms.all_to_all(self._rounds, sources, sent, targets, taken)
        target.store()

    def barrier(self, line: int) -> None:
        """Wait for all."""
        self._rounds.begin(fact_of("barrier", 0), line)
        algorithms.barrier(self._rounds)

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


class Staged:
    """The elements of a tensor as one contiguous block of memory.

    Args:
        tensor: The tensor: dense, of a class that holds its elements itself.
        reads: Whether its current elements are needed.

    Raises:
        TensorError: it has no memory in this process, or less than its elements take.
    """

    __slots__ = ("_copy", "_tensor", "address", "count", "size")

    def __init__(self, tensor: torch.Tensor, *, reads: bool) -> None:
        self._tensor = tensor
        self._copy: torch.Tensor | None = None
        self.count = tensor.numel()
        """Number of elements."""
        self.size = self.count * tensor.element_size()
        """Bytes."""
        if not (tensor.is_contiguous() and tensor.device.type == "cpu" and not (tensor.is_conj() or tensor.is_neg())):
            with torch.no_grad():
                self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                if reads:
                    self._copy.copy_(tensor)
            tensor = self._copy
        self.address = _address(tensor) if self.size else 0

    def store(self) -> None:
        """Copy the block back into the tensor if it is a copy."""
        if self._copy is not None:
            with torch.inference_mode():  # inference tensors can be changed only here
                self._tensor.copy_(self._copy)


def stage(tensor: torch.Tensor, *, reads: bool = True, writes: bool | None = None) -> Staged:
    """Return the block of memory of a tensor.

    Args:
        tensor: Any tensor.
        reads: Whether its current elements are needed.
        writes: Whether `store` will change it; None: if its elements are not needed.

    Raises:
        TensorError: it is not dense, has no memory here, or several of its elements share memory that is written to.
    """
    if type(tensor) is not torch.Tensor:
        tensor = _unwrapped(tensor)
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        kind = next((name for name in ("nested", "quantized", "meta") if getattr(tensor, f"is_{name}")), tensor.layout)
        raise TensorError(f"A tensor must be dense and have memory to be communicated; got a tensor that is {kind}.")
    if (not reads if writes is None else writes) and not tensor.is_contiguous() and _overlaps(tensor):
        raise TensorError("Elements of an expanded tensor share memory: communicate a copy, such as x.contiguous().")
    return Staged(tensor, reads=reads)


def _unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that holds the elements; wait for it if it is the result of a functional collective.

    Raises:
        TensorError: none does in this process alone, as with a DTensor.
    """
    if (wait := getattr(tensor, "trigger_wait", None)) is not None:  # AsyncCollectiveTensor, whose module is private
        held: torch.Tensor = wait()
        return held
    if type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return tensor
    local = " Use .to_local() or .full_tensor()." if hasattr(tensor, "to_local") else ""
    raise TensorError(f"A {type(tensor).__name__} cannot be communicated: it wraps other tensors.{local}")


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements share memory, as `expand` makes them; torch checks no more before it copies into a tensor."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _address(tensor: torch.Tensor) -> int:
    """Return the address of a contiguous tensor's first element.

    Raises:
        TensorError: the tensor has no memory, or its storage was freed or shrunk.
    """
    try:
        address = tensor.data_ptr()
        held = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
    except RuntimeError as error:  # such as that of a function that torch.func transforms
        raise TensorError(f"A {type(tensor).__name__} has no memory that can be communicated: {error}") from None
    if not address or held < tensor.nbytes:
        raise TensorError(
            f"A tensor of {tensor.nbytes:,} bytes has {max(held, 0) if address else 0:,} bytes of memory: its storage "
            "was freed or resized."
        )
    return address


def stage_all(tensors: list[torch.Tensor], *, reads: bool = True) -> list[Staged]:
    """Return the blocks of several tensors."""
    return [stage(tensor, reads=reads) for tensor in tensors]


class _Memory:
    """An object that NumPy turns into an array without involving torch."""

    def __init__(self, address: int, size: int) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}


def flat_buffer(staged: Staged) -> Any:
    """Return the block as a buffer of bytes; the caller keeps the tensor alive."""
    return np.asarray(_Memory(staged.address, staged.size)) if staged.size else bytearray()


def scratch_buffer(size: int) -> tuple[Any, int]:
    """Allocate memory in this process: a buffer and its address."""
    memory = (ctypes.c_char * size)()
    return memory, ctypes.addressof(memory)


def split_bytes(tensor: torch.Tensor, splits: Sequence[int], ranks: int) -> list[int]:
    """Return the number of bytes per rank in a tensor that is split by rows; without splits, equal parts.

    Raises:
        TensorMismatchError: the splits do not add up to the tensor's rows.
    """
    rows = tensor.shape[0] if tensor.ndim else 1
    if not splits:
        if rows % ranks:
            raise TensorMismatchError(f"all_to_all: the number of rows ({rows}) must be divisible by {ranks} ranks.")
        return [tensor.nbytes // ranks] * ranks
    if len(splits) != ranks or sum(splits) != rows:
        raise TensorMismatchError(
            f"all_to_all: split sizes must be {ranks} numbers with the sum {rows} (rows); got {list(splits)}."
        )
    row = tensor.nbytes // rows if rows else 0
    return [count * row for count in splits]


def check_sizes(name: str, parts: Sequence[torch.Tensor], size: int, ranks: int, *, only: int = -1) -> None:
    """Raise if a list does not have one tensor of `size` bytes per rank; `only`: the tensors of others may differ."""
    if len(parts) != ranks:
        raise TensorMismatchError(f"{name} needs {ranks} tensors, one per rank; got {len(parts)}.")
    for rank, part in enumerate(parts):
        if part.nbytes != size and only in (-1, rank):
            raise TensorMismatchError(
                f"{name}: the tensor for rank {rank} has {part.nbytes:,} bytes; must be {size:,}."
            )


def check_whole(name: str, whole: torch.Tensor, part: torch.Tensor, ranks: int) -> None:
    """Raise if a tensor does not have `ranks` times the elements of another."""
    if whole.dtype is not part.dtype:
        raise TensorError(f"{name}: the tensors must have one dtype; got {whole.dtype} and {part.dtype}.")
    if whole.numel() != part.numel() * ranks:
        expected = f"{part.numel() * ranks:,}"
        raise TensorMismatchError(f"{name}: the large tensor must have {expected} elements; got {whole.numel():,}.")
