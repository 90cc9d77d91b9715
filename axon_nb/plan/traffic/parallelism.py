"""What each kind of parallelism sends in a step: data parallelism, pipelines, and tensor parallelism.

Data parallelism (DDP, ZeRO-1, FSDP2 with each strategy) is as in torch 2.11 to 2.13, from the second step on: DDP
orders its buckets by when gradients became ready.

Tensor parallelism goes by the style of each module. Shoeybi et al., Megatron-LM (2019), section 3: a block's attention
and its MLP each all-reduce the output once in forward and the input's gradient once in backward. Korthikanti et al.
(2022), section 4.2.2: with sequence parallelism each all-reduce becomes a reduce_scatter on one side and an all_gather
on the other.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from msgspec import Struct
from torch import nn

from axon_nb.errors import UsageError
from axon_nb.parallel.memory import ShardingStrategy, partition_parameters
from axon_nb.parallel.tensor.parallelize import has_prepared_input
from axon_nb.plan.tracing.subject import owner
from axon_nb.plan.tracing.trace import ModelTrace, TensorFacts
from axon_nb.plan.traffic.layout import LocalTensor, ParallelLayout, StageAssignment
from axon_nb.plan.traffic.plan import Traffic, grouped

_BROADCAST_BYTES = 250 * 1024 * 1024
"""DDP broadcasts buffers in chunks of about this size."""
_FACTS = 4
"""Number of 8-byte integers that ranks exchange before a step."""
_FORWARD, _BACKWARD = "forward", "backward"
_NORMS = "gradients of norms"


class FSDPUnit(Struct, frozen=True):
    """Parameters that FSDP gathers together."""

    name: str
    """The module's name; empty: the model itself."""
    parameters: tuple[LocalTensor, ...]
    runs_backward: bool = True
    """Whether its output gets a gradient, so that backward gathers its parameters again."""


def fill_buckets(sizes: Iterable[tuple[int, object]], limits: Sequence[int]) -> list[list[int]]:
    """Assign tensors to buckets as DDP's reducer does.

    A bucket is full when it holds at least its limit; tensors are never split.

    Args:
        sizes: Bytes of each tensor, and what all tensors of a bucket share, such as the dtype.
        limits: Bytes of the first bucket of a kind, of the second, and so on; the last limit repeats.

    Returns:
        Indices into `sizes`, bucket by bucket: full buckets in the order in which they filled up, then the rest.
    """
    full: list[list[int]] = []
    filling: dict[object, list[int]] = {}
    filled_bytes: dict[object, int] = {}
    limit: dict[object, int] = {}
    for index, (size, kind) in enumerate(sizes):
        filling.setdefault(kind, []).append(index)
        filled_bytes[kind] = filled_bytes.get(kind, 0) + size
        next_limit = limit.setdefault(kind, 0)
        if filled_bytes[kind] >= limits[next_limit]:
            full.append(filling.pop(kind))
            filled_bytes[kind] = 0
            limit[kind] = min(next_limit + 1, len(limits) - 1)
    return full + list(filling.values())


def ddp(
    ready: Sequence[LocalTensor], buffers: Sequence[LocalTensor], *, axis: str, num_ranks: int, bucket_bytes: float
) -> Iterator[Traffic]:
    """Yield what DDP sends.

    Args:
        ready: Parameters that get gradients, in the order in which they get them.
        buffers: The model's buffers; rank 0 broadcasts them before each forward.
        axis: Name of the data axis.
        num_ranks: Ranks along it.
        bucket_bytes: Bytes at which a bucket is full.
    """
    if buffers:
        filled = fill_buckets([(tensor.nbytes, tensor.dtype) for tensor in buffers], [_BROADCAST_BYTES])
        sizes = [sum(buffers[index].nbytes for index in bucket) for bucket in filled]
        yield Traffic(axis, num_ranks, "broadcast", "forward", "buffers of rank 0", grouped(sizes))
    filled = fill_buckets([(tensor.nbytes, tensor.dtype) for tensor in ready], [int(bucket_bytes)])
    sizes = [sum(ready[index].nbytes for index in bucket) for bucket in filled]
    if sizes[:-1]:
        yield Traffic(axis, num_ranks, "all_reduce", "backward", "gradients", grouped(sizes[:-1]), "backward")
    if sizes:
        yield Traffic(axis, num_ranks, "all_reduce", "backward", "gradients, last bucket", grouped(sizes[-1:]))


def zero1(
    parameters: Sequence[LocalTensor],
    ready: Sequence[LocalTensor],
    buffers: Sequence[LocalTensor],
    *,
    axis: str,
    num_ranks: int,
    bucket_bytes: float,
    waits: bool,
) -> Iterator[Traffic]:
    """Yield what ZeRO-1 sends: as DDP, and in the optimizer's step each rank's parameters to all.

    Args:
        parameters: All parameters, in the order of the optimizer's one group.
        ready: The same as in `ddp`.
        buffers: The same as in `ddp`.
        axis: The same as in `ddp`.
        num_ranks: The same as in `ddp`.
        bucket_bytes: The same as in `ddp`.
        waits: Whether a barrier precedes the optimizer's step, as on CPUs.
    """
    yield from ddp(ready, buffers, axis=axis, num_ranks=num_ranks, bucket_bytes=bucket_bytes)
    if waits:
        yield Traffic(axis, num_ranks, "barrier", "optimizer", "before the optimizer's step", ((0, 1),))
    owned = partition_parameters([math.prod(tensor.shape) for tensor in parameters], num_ranks)
    empty = torch.get_default_dtype().itemsize  # torch sends one element for a rank without parameters
    sizes = [sum(parameters[i].nbytes for i in indices if parameters[i].requires_grad) or empty for indices in owned]
    yield Traffic(axis, num_ranks, "broadcast", "optimizer", "updated parameters", grouped(sizes))


def fsdp(
    units: Sequence[FSDPUnit],
    strategy: ShardingStrategy,
    *,
    shard: tuple[str, int],
    replicate: tuple[str, int] | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> Iterator[Traffic]:
    """Yield what FSDP2 sends.

    Args:
        units: The model itself, then its units in the order of forward.
        strategy: What is sharded.
        shard: Name and size of the shard axis; size 1 with NO_SHARD.
        replicate: The replica axis, with HYBRID_SHARD and NO_SHARD.
        param_dtype: The dtype of gathered parameters; None: as they are.
        reduce_dtype: The dtype of reduced gradients; None: as they are.
    """
    axis, num_shards = shard
    stays_unsharded = strategy in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)
    units = [unit for unit in units if unit.parameters]
    if num_shards > 1:
        unsharded = [
            sum(_padded(tensor, num_shards) * _width(tensor, param_dtype) for tensor in unit.parameters)
            for unit in units
        ]
        yield Traffic(axis, num_shards, "all_gather", "forward", "parameters, first unit", grouped(unsharded[:1]))
        if unsharded[1:]:
            yield Traffic(axis, num_shards, "all_gather", "forward", "parameters", grouped(unsharded[1:]), "forward")
        regathered = [size for unit, size in zip(units, unsharded, strict=True) if unit.name and unit.runs_backward]
        if regathered and not stays_unsharded:
            # Backward prefetches the previous unit while one computes; the first one's gather is not overlapped.
            yield Traffic(axis, num_shards, "all_gather", "backward", "parameters, last unit", grouped(regathered[-1:]))
            if regathered[:-1]:
                yield Traffic(
                    axis, num_shards, "all_gather", "backward", "parameters", grouped(regathered[-2::-1]), "backward"
                )
    sizes = []
    for unit in reversed(units):
        trained = [tensor for tensor in unit.parameters if tensor.has_grad]
        if trained:
            width = (reduce_dtype or param_dtype or trained[0].dtype).itemsize
            sizes.append(sum(_padded(tensor, num_shards) for tensor in trained) * width)
    steps = [("reduce_scatter", axis, num_shards, sizes)] if num_shards > 1 else []
    if replicate is not None and replicate[1] > 1:
        steps.append(("all_reduce", *replicate, [size // num_shards for size in sizes]))
    for operation, name, num_ranks, each in steps:
        if each[:-1]:
            yield Traffic(name, num_ranks, operation, "backward", "gradients", grouped(each[:-1]), "backward")
        if each:
            yield Traffic(name, num_ranks, operation, "backward", "gradients, last unit", grouped(each[-1:]))


def _padded(tensor: LocalTensor, num_ranks: int) -> int:
    """Elements of a parameter whose first dimension is padded to a multiple of the ranks."""
    rows = tensor.shape[0] if tensor.shape else 1
    if not rows:
        return 0
    return -(-rows // num_ranks) * num_ranks * (math.prod(tensor.shape) // rows)


def _width(tensor: LocalTensor, dtype: torch.dtype | None) -> int:
    return (dtype or tensor.dtype).itemsize


def group_into_units(
    inner: Sequence[str], parameters: Sequence[LocalTensor], backward: Collection[str] | None
) -> list[FSDPUnit]:
    """Group parameters into units, in module order; the model's own unit comes first.

    Args:
        inner: Names of the modules that are units of their own, in module order.
        parameters: One rank's parameters.
        backward: Names of the modules whose outputs need a gradient; None: all.
    """
    members: dict[str, list[LocalTensor]] = {name: [] for name in inner}
    root: list[LocalTensor] = []
    for tensor in parameters:
        path = owner(tensor.name, members)
        (members[path] if path else root).append(tensor)
    made = [FSDPUnit(name, tuple(tensor), backward is None or name in backward) for name, tensor in members.items()]
    return [FSDPUnit("", tuple(root)), *made]


def boundaries(layout: ParallelLayout, stages: StageAssignment) -> list[tuple[int, int]]:
    """Return the bytes of one microbatch that a rank sends over each stage boundary: (forward, backward).

    Raises:
        UsageError: the batch is not divisible into microbatches.
    """
    sizes = []
    for names in stages.children[:-1]:
        facts = layout.trace.outputs[names[-1]]
        rows = facts[0].shape[0] if facts and facts[0].shape else 0
        if not rows or rows % stages.num_microbatches:
            raise UsageError(
                f"The batch ({rows} samples) must be divisible by num_microbatches ({stages.num_microbatches}): change "
                "one of them."
            )
        parts = stages.num_microbatches * layout.size("cp") * layout.boundary_shares.get(names[-1], 1)
        forward = sum(fact.nbytes for fact in facts)
        backward = sum(fact.nbytes for fact in facts if fact.requires_grad)
        sizes.append((forward // parts, backward // parts))
    return sizes


def pipeline_traffic(layout: ParallelLayout) -> Iterator[Traffic]:
    """Yield what each pipeline rank sends and receives; stages on the same rank exchange no messages."""
    stages = layout.stages
    assert stages is not None
    ranks, count, num_ranks = stages.rank_of_stage, stages.num_microbatches, stages.num_ranks
    for pp_rank in range(num_ranks):
        facts = ((num_ranks * _FACTS * 8, 1),)
        yield Traffic("pp", num_ranks, "all_gather", "forward", "batch check", facts, pp_rank=pp_rank)
        yield Traffic("pp", num_ranks, "barrier", "backward", "end of the step", ((0, 1),), pp_rank=pp_rank)
    for stage, (forward, backward) in enumerate(boundaries(layout, stages)):
        first, second = ranks[stage], ranks[stage + 1]
        if first == second:
            continue
        for phase, size, source, target in (("forward", forward, first, second), ("backward", backward, second, first)):
            if size:
                what = f"{'activations' if phase == 'forward' else 'gradients'} between stages {stage} and {stage + 1}"
                messages = ((size, count),)
                yield Traffic("pp", num_ranks, "send", phase, what, messages, phase, source)
                yield Traffic("pp", num_ranks, "recv", phase, what, messages, phase, target)


class _Call(Struct, frozen=True):
    phase: str
    operation: str
    purpose: str
    size: int


def tensor_parallel_traffic(layout: ParallelLayout) -> Iterator[Traffic]:
    """Yield what ranks along ``tp`` send each other."""
    trace, parts, positions = layout.trace, layout.parts, layout.size("cp")
    calls: dict[tuple[int, str, str, str], list[int]] = {}
    for name, style in layout.styles.items():
        pp_rank = layout.pp_rank_of(name)
        for call in _calls(trace, name, style, layout.styles, sequence=layout.sequence):
            once = call.purpose == _NORMS
            sizes = [call.size] if once else [call.size // parts // positions] * parts
            calls.setdefault((pp_rank, call.phase, call.operation, call.purpose), []).extend(sizes)
    if layout.parallel_loss:
        key = (layout.pp_rank_of(""), _FORWARD, "all_reduce", "loss of sharded logits")
        tokens = _tokens(trace)
        for size in (tokens * 4, 2 * tokens * 4):
            calls.setdefault(key, []).extend([size // parts // positions] * parts)
    for (pp_rank, phase, operation, purpose), sizes in calls.items():
        yield Traffic("tp", layout.size("tp"), operation, phase, purpose, grouped(sizes), pp_rank=pp_rank)


def _calls(trace: ModelTrace, name: str, style: str, styles: Mapping[str, str], *, sequence: bool) -> Iterator[_Call]:
    input_, output = _first(trace.inputs.get(name, ())), _first(trace.outputs.get(name, ()))
    if input_ is None or output is None:
        return
    module = trace.model.get_submodule(name)
    is_nested = has_prepared_input(name, styles)
    yield from _of_input(input_, style, is_nested=is_nested, sequence=sequence and not isinstance(module, nn.Embedding))
    if style in ("row", "split+row"):
        yield _Call(_FORWARD, "reduce_scatter" if sequence else "all_reduce", "sum of the output", output.nbytes)
    if style == "column+gather":
        yield _Call(_FORWARD, "all_gather", "features of the output", output.nbytes)
    if (style in ("row", "split+row") and sequence) or (style == "split" and output.requires_grad):
        yield _Call(_BACKWARD, "all_gather", "gradient of the output", output.nbytes)
    if style in ("sequence", "heads"):
        # DTensor keeps them as partial sums and all-reduces them each time that they are read.
        for leaf, parameter in module.named_parameters():
            size = parameter.numel() * parameter.dtype.itemsize
            for _ in range(trace.grad_uses.get(f"{name}.{leaf}", 1)):
                yield _Call("optimizer", "all_reduce", _NORMS, size)


def _of_input(input_: TensorFacts, style: str, *, is_nested: bool, sequence: bool) -> Iterator[_Call]:
    """What a module's input and its gradient send."""
    gathers_input = style in ("column", "column+gather") and not is_nested
    backward = ""
    if style == "gather" or (gathers_input and sequence):
        yield _Call(_FORWARD, "all_gather", "positions of the input", input_.nbytes)
        backward = "reduce_scatter"
    elif style == "share" or gathers_input:
        backward = "all_reduce"
    elif style == "split+row":
        backward = "all_gather"
    if backward and input_.requires_grad:
        yield _Call(_BACKWARD, backward, "gradient of the input", input_.nbytes)


def _first(facts: tuple[TensorFacts, ...]) -> TensorFacts | None:
    return facts[0] if facts else None


def _tokens(trace: ModelTrace) -> int:
    """Number of tokens: elements of the model's output without its last dimension."""
    logits = trace.outputs[""][0]
    return TensorFacts(logits.shape[:-1], torch.uint8, False).nbytes
