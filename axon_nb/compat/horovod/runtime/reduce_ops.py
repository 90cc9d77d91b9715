"""Reduce operations with Horovod's names and numbers, and their arithmetic."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Iterable

import torch

from axon_nb.comm import ReduceOp
from axon_nb.compat.horovod.runtime.errors import NotSupportedError
from axon_nb.errors import UsageError

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Op",
    "Product",
    "Sum",
    "check_dtypes",
    "check_gradient",
    "chosen_op",
    "comm_op",
    "finish_average",
    "in_words",
    "scale",
]


class Op(enum.IntEnum):
    """Reduce operations; the numbers are Horovod's."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    """Defined so that scripts can name it; using it raises."""
    MIN = 3
    MAX = 4
    PRODUCT = 5


Average, Sum, Adasum, Min, Max, Product = Op

# An average is a sum that is divided afterwards: so integers have one too.
_COMM = {
    Op.AVERAGE: ReduceOp.SUM,
    Op.SUM: ReduceOp.SUM,
    Op.MIN: ReduceOp.MIN,
    Op.MAX: ReduceOp.MAX,
    Op.PRODUCT: ReduceOp.PRODUCT,
}


def chosen_op(op: int | None, average: bool | None = None) -> Op:
    """Resolve a call's operation; default is Average.

    Args:
        op: One of Average, Sum, Min, Max, Product.
        average: The older parameter; True is Average, False is Sum.

    Raises:
        NotSupportedError: Adasum.
        UsageError: both were given, or `op` is none of them.
    """
    if op is None:
        if average is None:
            return Op.AVERAGE
        warnings.warn(
            "Parameter `average` has been replaced with `op` and will be removed in v1.0",
            DeprecationWarning,
            stacklevel=3,
        )
        return Op.AVERAGE if average else Op.SUM
    if average is not None:
        raise UsageError("The op parameter supersedes average. Please provide only one of them.")
    try:
        found = Op(op)
    except ValueError:
        raise UsageError(f"op must be hvd.Average, Sum, Min, Max or Product; got {op!r}.") from None
    if found is Op.ADASUM:
        raise NotSupportedError(
            "op=hvd.Adasum is not supported: use hvd.Average with the learning rate scaled by hvd.size(), or "
            "hvd.Sum with the rate as it is."
        )
    return found


def comm_op(op: Op) -> ReduceOp:
    """The groups' operation for it; an average is a sum that `finish_average` divides."""
    return _COMM[op]


def scale(tensor: torch.Tensor, factor: float) -> None:
    """Multiply in place; integers in double precision and truncated, as in Horovod."""
    if factor == 1.0:
        return
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor.double().mul_(factor).trunc_())


def finish_average(tensor: torch.Tensor, size: int) -> None:
    """Divide a sum over `size` ranks in place; integers are truncated, as in Horovod."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.div_(size)
    else:
        tensor.copy_(torch.div(tensor, size, rounding_mode="trunc"))


def in_words(op: Op, factors: tuple[float, float]) -> str:
    """Describe the operation and its scaling, which must match on all ranks."""
    if factors == (1.0, 1.0):
        return op.name.title()
    return f"{op.name.title()} (prescale_factor={factors[0]:g}, postscale_factor={factors[1]:g})"


def check_dtypes(op: Op, tensors: Iterable[torch.Tensor], what: str) -> None:
    """Check that the operation supports the dtypes.

    Raises:
        UsageError: an average of booleans.
    """
    if op is Op.AVERAGE and any(tensor.dtype is torch.bool for tensor in tensors):
        raise UsageError(f"hvd.{what} of torch.bool: cannot average booleans; use op=hvd.Sum (logical or) or .float().")


def check_gradient(op: Op, what: str) -> None:
    """Check that the operation has a gradient.

    Raises:
        NotSupportedError: the operation is neither Average nor Sum.
    """
    if op not in (Op.AVERAGE, Op.SUM):
        raise NotSupportedError(
            f"hvd.{what} with op=hvd.{op.name.title()} has no gradient; it is defined for Average and Sum. Detach the "
            "tensor if you need none."
        )
