"""reducescatter and grouped_reducescatter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from axon_nb.compat.horovod.allgather import grouped_allgather_async
from axon_nb.compat.horovod.compression import Compression, Compressor
from axon_nb.compat.horovod.runtime.handles import begin, checked, synchronize
from axon_nb.compat.horovod.runtime.operation import Operation, described
from axon_nb.compat.horovod.runtime.process_sets import ProcessSet, channel_of, global_process_set
from axon_nb.compat.horovod.runtime.reduce_ops import Op, check_dtypes, check_gradient, chosen_op, in_words
from axon_nb.compat.horovod.runtime.transfers import scattered
from axon_nb.errors import UsageError

__all__ = ["grouped_reducescatter", "grouped_reducescatter_async", "reducescatter", "reducescatter_async"]


def _operation(kind: str, tensor: torch.Tensor, name: str, op: Op, factors: tuple[float, float]) -> Operation:
    value = checked(tensor, kind)
    if not value.ndim:
        raise UsageError(
            f"hvd.{kind} of a rank-zero tensor: it scatters rows, so the tensor needs at least one dimension."
        )
    check_dtypes(op, [value], kind)
    brings = f"{in_words(op, factors)} of {described([value])}"
    copy = value.clone(memory_format=torch.contiguous_format)
    return Operation(kind, name, brings, scattered(copy, op, *factors))


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Op.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start reducing a tensor over ranks and scattering its rows. See `reducescatter`.

    Returns:
        A handle for `poll` and `synchronize`.
    """
    kind, channel = "reducescatter", channel_of(process_set)
    named = channel.next_name(kind) if name is None else name
    operation = _operation(kind, tensor, named, chosen_op(op), (prescale_factor, postscale_factor))
    return begin(channel, [operation], lambda results: results[0])


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Op.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start reducing several tensors over ranks and scattering their rows. See `reducescatter`.

    Returns:
        A handle for `poll` and `synchronize`, which returns a list.
    """
    kind, channel = "grouped_reducescatter", channel_of(process_set)
    base, chosen = channel.next_name(kind) if name is None else name, chosen_op(op)
    factors = (prescale_factor, postscale_factor)
    operations = [
        _operation(kind, tensor, f"{base}.{number}", chosen, factors) for number, tensor in enumerate(tensors)
    ]
    if not operations:
        raise UsageError(f"hvd.{kind} needs at least one tensor.")
    return begin(channel, operations, list)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Op.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce a tensor over ranks and scatter the rows of the result.

    Args:
        tensor: Same dtype and shape on all ranks; not changed.
        name: Name of the collective; None for an automatic one.
        compression: Compression of the tensor for communication.
        op: Average, Sum, Min, Max or Product.
        process_set: The participating ranks.
        prescale_factor: Factor applied to the tensor before the reduction.
        postscale_factor: Factor applied to the result.

    Returns:
        A new tensor: this rank's rows. If rows do not divide evenly, the first ranks get one more.
    """
    packed, context = compression.compress(tensor)
    call = ("reducescatter", name, chosen_op(op), process_set, prescale_factor, postscale_factor)
    result = _Reducescatter.apply(call, packed)  # type: ignore[no-untyped-call]
    unpacked: torch.Tensor = compression.decompress(result[0], context)
    return unpacked


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Op.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduce several tensors over ranks and scatter the rows of each. See `reducescatter`."""
    packed = [compression.compress(tensor) for tensor in tensors]
    call = ("grouped_reducescatter", name, chosen_op(op), process_set, prescale_factor, postscale_factor)
    results = _Reducescatter.apply(call, *(value for value, _ in packed))  # type: ignore[no-untyped-call]
    return [compression.decompress(result, context) for result, (_, context) in zip(results, packed, strict=True)]


class _Reducescatter(torch.autograd.Function):
    """Reduce-scatter; backward gathers the gradients of all rows."""

    @staticmethod
    def forward(ctx: Any, call: tuple[Any, ...], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Reduce and scatter."""
        kind, name, op, process_set, before, after = call
        ctx.call = call
        if kind == "reducescatter":
            return (synchronize(reducescatter_async(tensors[0], name, op, process_set, before, after)),)
        return tuple(synchronize(grouped_reducescatter_async(tensors, name, op, process_set, before, after)))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Gather."""
        kind, _, op, process_set, before, after = ctx.call
        check_gradient(op, kind)
        factor = before * after * (process_set.size() if op is Op.SUM else 1)
        own = [gradient * factor for gradient in gradients]
        return None, *synchronize(grouped_allgather_async(own, process_set=process_set))
