"""What data parallelism sends in a step: DDP, ZeRO-1, and FSDP2 with each strategy.

As torch 2.11 to 2.13 do it, from the second step on: DDP makes its buckets in the order in which gradients were ready.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from axon_nb.parallel.memory import partition_parameters
from axon_nb.parallel.strategies import ShardingStrategy
from axon_nb.plan.communication_plan import Traffic, grouped

__all__ = ["Held", "Unit", "ddp", "fill_buckets", "fsdp", "units_of", "zero1"]

_BROADCAST_BYTES = 250 * 1024 * 1024
"""DDP sends buffers in parts of about so many bytes."""


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter or a buffer as one rank of the data axis has it before sharding: its part over ``tp``."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    has_grad: bool = True
    """Whether it gets a gradient in a step."""
    trained: bool = True
    """Whether it could."""

    @property
    def elements(self) -> int:
        """Number of them."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Unit:
    """What FSDP gathers together."""

    name: str
    """Of the module; empty: the model itself."""
    parameters: tuple[Held, ...]
    runs_backward: bool = True
    """Whether a gradient comes to its output, so that its parameters are wanted again."""


def fill_buckets(sizes: Iterable[tuple[int, object]], limits: Sequence[int]) -> list[list[int]]:
    """Which tensors travel together, as DDP's reducer deals them out.

    A bucket is full when it holds at least its limit; a tensor is never cut.

    Args:
        sizes: Bytes of each tensor, and what all of a bucket have in common, such as the dtype.
        limits: In bytes, of the first bucket of a kind, of the second, and so on; the last one stays.

    Returns:
        Places in `sizes`, bucket by bucket: those that became full first, then the rest.
    """
    full: list[list[int]] = []
    filling: dict[object, list[int]] = {}
    held: dict[object, int] = {}
    limit: dict[object, int] = {}
    for place, (size, kind) in enumerate(sizes):
        filling.setdefault(kind, []).append(place)
        held[kind] = held.get(kind, 0) + size
        which = limit.setdefault(kind, 0)
        if held[kind] >= limits[which]:
            full.append(filling.pop(kind))
            held[kind] = 0
            limit[kind] = min(which + 1, len(limits) - 1)
    return full + list(filling.values())


def ddp(
    ready: Sequence[Held], buffers: Sequence[Held], *, axis: str, ranks: int, bucket_bytes: float
) -> Iterator[Traffic]:
    """What DDP sends.

    Args:
        ready: Parameters that get gradients, in that order.
        buffers: Of the model; those of rank 0 are sent before each forward.
        axis: Name of the data axis.
        ranks: Ranks along it.
        bucket_bytes: A bucket is full at so many.
    """
    if buffers:
        filled = fill_buckets([(held.nbytes, held.dtype) for held in buffers], [_BROADCAST_BYTES])
        sizes = [sum(buffers[place].nbytes for place in bucket) for bucket in filled]
        yield Traffic(axis, ranks, "broadcast", "forward", "buffers of rank 0", grouped(sizes))
    filled = fill_buckets([(held.nbytes, held.dtype) for held in ready], [int(bucket_bytes)])
    sizes = [sum(ready[place].nbytes for place in bucket) for bucket in filled]
    if sizes[:-1]:
        yield Traffic(axis, ranks, "all_reduce", "backward", "gradients", grouped(sizes[:-1]), "backward")
    if sizes:
        yield Traffic(axis, ranks, "all_reduce", "backward", "gradients, last bucket", grouped(sizes[-1:]))


def zero1(
    parameters: Sequence[Held],
    ready: Sequence[Held],
    buffers: Sequence[Held],
    *,
    axis: str,
    ranks: int,
    bucket_bytes: float,
    waits: bool,
) -> Iterator[Traffic]:
    """What ZeRO-1 sends: as DDP, and in the optimizer's step each rank's parameters to all.

    Args:
        parameters: All of them, in the order of the optimizer's one group.
        ready: As in `ddp`.
        buffers: As in `ddp`.
        axis: As in `ddp`.
        ranks: As in `ddp`.
        bucket_bytes: As in `ddp`.
        waits: Ranks wait for each other before the step, as they do on CPUs.
    """
    yield from ddp(ready, buffers, axis=axis, ranks=ranks, bucket_bytes=bucket_bytes)
    if waits:
        yield Traffic(axis, ranks, "barrier", "optimizer", "all ranks have come to the step", ((0, 1),))
    owned = partition_parameters([math.prod(held.shape) for held in parameters], ranks)
    empty = torch.get_default_dtype().itemsize  # torch sends one element for a rank that has none
    sizes = [sum(parameters[i].nbytes for i in places if parameters[i].trained) or empty for places in owned]
    yield Traffic(axis, ranks, "broadcast", "optimizer", "updated parameters", grouped(sizes))


def fsdp(
    units: Sequence[Unit],
    strategy: ShardingStrategy,
    *,
    shard: tuple[str, int],
    replicate: tuple[str, int] | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> Iterator[Traffic]:
    """What FSDP2 sends.

    Args:
        units: The model itself, then the others in the order of forward.
        strategy: What is sharded.
        shard: Name and size of the axis of the shards; of size 1 with NO_SHARD.
        replicate: The axis of the copies, with HYBRID_SHARD and NO_SHARD.
        param_dtype: Of parameters while they are whole; None: as they are.
        reduce_dtype: Of gradients while they travel; None: as they are.
    """
    axis, ways = shard
    keep_whole = strategy in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)
    units = [unit for unit in units if unit.parameters]
    if ways > 1:
        whole = [sum(_padded(held, ways) * _width(held, param_dtype) for held in unit.parameters) for unit in units]
        yield Traffic(axis, ways, "all_gather", "forward", "parameters, first unit", grouped(whole[:1]))
        if whole[1:]:
            yield Traffic(axis, ways, "all_gather", "forward", "parameters", grouped(whole[1:]), "forward")
        again = [size for unit, size in zip(units, whole, strict=True) if unit.name and unit.runs_backward]
        if again and not keep_whole:
            # Backward prefetches the unit before while one computes; the first to go back is gathered with no cover.
            yield Traffic(axis, ways, "all_gather", "backward", "parameters, last unit", grouped(again[-1:]))
            if again[:-1]:
                yield Traffic(axis, ways, "all_gather", "backward", "parameters", grouped(again[-2::-1]), "backward")
    sizes = []
    for unit in reversed(units):
        trained = [held for held in unit.parameters if held.has_grad]
        if trained:
            width = (reduce_dtype or param_dtype or trained[0].dtype).itemsize
            sizes.append(sum(_padded(held, ways) for held in trained) * width)
    steps = [("reduce_scatter", axis, ways, sizes)] if ways > 1 else []
    if replicate is not None and replicate[1] > 1:
        steps.append(("all_reduce", *replicate, [size // ways for size in sizes]))
    for operation, name, ranks, each in steps:
        if each[:-1]:
            yield Traffic(name, ranks, operation, "backward", "gradients", grouped(each[:-1]), "backward")
        if each:
            yield Traffic(name, ranks, operation, "backward", "gradients, last unit", grouped(each[-1:]))


def _padded(held: Held, ways: int) -> int:
    """Elements of a parameter, its first dimension padded to a multiple of the ranks."""
    rows = held.shape[0] if held.shape else 1
    if not rows:
        return 0
    return -(-rows // ways) * ways * (math.prod(held.shape) // rows)


def _width(held: Held, dtype: torch.dtype | None) -> int:
    return (dtype or held.dtype).itemsize


def units_of(inner: Sequence[str], parameters: Sequence[Held], backward: Collection[str] | None) -> list[Unit]:
    """The parameters of each unit, in the order in which modules are made; first those that only the model itself has.

    Args:
        inner: Names of the modules that are units of their own, in the order in which they are made.
        parameters: As one rank has them, by their names.
        backward: Names of the modules whose outputs need a gradient; None: all.
    """
    members: dict[str, list[Held]] = {name: [] for name in inner}
    own: list[Held] = []
    for held in parameters:
        path = held.name
        while path and path not in members:
            path = path.rpartition(".")[0]
        (members[path] if path else own).append(held)
    made = [Unit(name, tuple(held), backward is None or name in backward) for name, held in members.items()]
    return [Unit("", tuple(own)), *made]
