"""allreduce and grouped_allreduce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from axon_nb.compat.horovod.compression import Compression, Compressor
from axon_nb.compat.horovod.runtime.handles import begin, checked, synchronize
from axon_nb.compat.horovod.runtime.operation import Operation, described
from axon_nb.compat.horovod.runtime.process_sets import ProcessSet, channel_of, global_process_set
from axon_nb.compat.horovod.runtime.reduce_ops import Op, check_dtypes, check_gradient, chosen_op, in_words
from axon_nb.compat.horovod.runtime.transfers import blueprint_of, reduced
from axon_nb.errors import UsageError

__all__ = [
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
]


def _begin(
    kind: str,
    outputs: Sequence[torch.Tensor],
    name: str | None,
    op: Op,
    factors: tuple[float, float],
    process_set: ProcessSet,
) -> int:
    channel = channel_of(process_set)
    if not outputs:
        raise UsageError(f"hvd.{kind} needs at least one tensor.")
    values = [checked(output, kind) for output in outputs]
    check_dtypes(op, values, kind)
    operation = Operation(
        kind,
        channel.next_name(kind) if name is None else name,
        f"{in_words(op, factors)} of {described(values)}",
        reduced(values, op, *factors),
        blueprint=blueprint_of(values, op),
    )
    single = kind == "allreduce"
    return begin(channel, [operation], lambda results: outputs[0] if single else list(outputs))


def _copies(tensors: Sequence[torch.Tensor], kind: str) -> list[torch.Tensor]:
    return [checked(tensor, kind).clone(memory_format=torch.contiguous_format) for tensor in tensors]


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start reducing a tensor over ranks; `tensor` is not changed. See `allreduce`.

    Returns:
        A handle for `poll` and `synchronize`.
    """
    chosen = chosen_op(op, average)
    return _begin(
        "allreduce", _copies([tensor], "allreduce"), name, chosen, (prescale_factor, postscale_factor), process_set
    )


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start reducing a tensor over ranks, in place. See `allreduce`.

    Returns:
        A handle for `poll` and `synchronize`.
    """
    chosen = chosen_op(op, average)
    return _begin("allreduce", [tensor], name, chosen, (prescale_factor, postscale_factor), process_set)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor over ranks, in place, and return it. See `allreduce`."""
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    result: torch.Tensor = synchronize(handle)
    return result


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor over all ranks; every rank gets the result. Differentiable for Average and Sum.

    Args:
        tensor: Same dtype and shape on all ranks; not changed.
        average: The older form of `op`.
        name: Name of the collective: calls with the same name match, in whatever order ranks make them. None for an
            automatic one.
        compression: Compression of the tensor for communication.
        op: Average (default), Sum, Min, Max or Product. The average of integers is truncated.
        prescale_factor: Factor applied to the tensor before the reduction.
        postscale_factor: Factor applied to the result.
        process_set: The participating ranks.

    Returns:
        A new tensor of the same shape and dtype.

    Raises:
        NotInitializedError: `hvd.init()` was not called.
        HorovodInternalError: ranks pass different tensors or operations under the name, or all ranks wait.
    """
    chosen = chosen_op(op, average)
    packed, context = compression.compress(tensor)
    factors = (prescale_factor, postscale_factor)
    result = _Allreduce.apply("allreduce", name, chosen, factors, process_set, packed)  # type: ignore[no-untyped-call]
    unpacked: torch.Tensor = compression.decompress(result[0], context)
    return unpacked


class _Allreduce(torch.autograd.Function):
    """A reduction whose gradient is reduced in the same way."""

    @staticmethod
    def forward(
        ctx: Any,
        kind: str,
        name: str | None,
        op: Op,
        factors: tuple[float, float],
        process_set: ProcessSet,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Reduce."""
        ctx.call = (kind, op, factors, process_set)
        return _reduce(kind, name, op, factors, process_set, tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Reduce."""
        kind, op, factors, process_set = ctx.call
        check_gradient(op, kind)
        return (None,) * 5 + _reduce(kind, None, op, factors, process_set, gradients)


def _reduce(
    kind: str,
    name: str | None,
    op: Op,
    factors: tuple[float, float],
    process_set: ProcessSet,
    tensors: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    result = synchronize(_begin(kind, _copies(tensors, kind), name, op, factors, process_set))
    return (result,) if kind == "allreduce" else tuple(result)


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start reducing several tensors over ranks as one; they are not changed. See `allreduce`.

    Returns:
        A handle for `poll` and `synchronize`, which returns a list.
    """
    kind, chosen = "grouped_allreduce", chosen_op(op, average)
    return _begin(kind, _copies(tensors, kind), name, chosen, (prescale_factor, postscale_factor), process_set)


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start reducing several tensors over ranks as one, in place. See `allreduce`.

    Returns:
        A handle for `poll` and `synchronize`, which returns a list.
    """
    kind, chosen = "grouped_allreduce", chosen_op(op, average)
    return _begin(kind, list(tensors), name, chosen, (prescale_factor, postscale_factor), process_set)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce several tensors over ranks as one, in place, and return them. See `allreduce`."""
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    result: list[torch.Tensor] = synchronize(handle)
    return result


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce several tensors over ranks as one, with one message per dtype. See `allreduce`."""
    chosen = chosen_op(op, average)
    packed = [compression.compress(tensor) for tensor in tensors]
    values = [value for value, _ in packed]
    factors = (prescale_factor, postscale_factor)
    results = _Allreduce.apply("grouped_allreduce", name, chosen, factors, process_set, *values)  # type: ignore[no-untyped-call]
    return [compression.decompress(result, context) for result, (_, context) in zip(results, packed, strict=True)]
