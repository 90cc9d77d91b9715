"""Average, Sum and the other operations, by Horovod's names and numbers, and their arithmetic."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Iterable

import torch

from axon_nb.comm import ReduceOp
from axon_nb.compat.horovod.errors import NotSupportedError
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
    """How values of several ranks become one; the numbers are Horovod's."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    """Known by name, so that scripts can offer it; refused where it is used."""
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
    """The operation that a call means: Average unless it says otherwise.

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
        raise UsageError(f"op={op!r}: it is one of hvd.Average, Sum, Min, Max and Product.") from None
    if found is Op.ADASUM:
        raise NotSupportedError(
            "op=hvd.Adasum is not supported: use hvd.Average with the learning rate scaled by hvd.size(), or "
            "hvd.Sum with the rate as it is."
        )
    return found


def comm_op(op: Op) -> ReduceOp:
    """What the groups carry out for it; an average is a sum that `finish_average` divides."""
    return _COMM[op]


def scale(tensor: torch.Tensor, factor: float) -> None:
    """Multiply in place; whole numbers in double precision, and what is behind the point is cut off, as in Horovod."""
    if factor == 1.0:
        return
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor.double().mul_(factor).trunc_())


def finish_average(tensor: torch.Tensor, size: int) -> None:
    """Divide a sum over `size` ranks in place; of whole numbers what is behind the point is cut off, as in Horovod."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.div_(size)
    else:
        tensor.copy_(torch.div(tensor, size, rounding_mode="trunc"))


def in_words(op: Op, factors: tuple[float, float]) -> str:
    """The operation and its scaling, which must be the same on all ranks."""
    if factors == (1.0, 1.0):
        return op.name.title()
    return f"{op.name.title()} (prescale_factor={factors[0]:g}, postscale_factor={factors[1]:g})"


def check_dtypes(op: Op, tensors: Iterable[torch.Tensor], what: str) -> None:
    """Say when the operation makes no sense.

    Raises:
        UsageError: an average of truths.
    """
    if op is Op.AVERAGE and any(tensor.dtype is torch.bool for tensor in tensors):
        raise UsageError(
            f"hvd.{what} of torch.bool: truths have no average; use op=hvd.Sum, which is any, or .float()."
        )


def check_gradient(op: Op, what: str) -> None:
    """Say when a gradient is asked for that is not defined.

    Raises:
        NotSupportedError: the operation is neither Average nor Sum.
    """
    if op not in (Op.AVERAGE, Op.SUM):
        raise NotSupportedError(
            f"the gradient of hvd.{what} with op=hvd.{op.name.title()}: it is defined for Average and Sum; detach the "
            "tensor where none is needed."
        )
