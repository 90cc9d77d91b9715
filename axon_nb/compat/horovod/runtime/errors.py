"""Exceptions, derived from the types that Horovod scripts catch.

HorovodInternalError    RuntimeError: a collective failed, or ranks called it differently
NotInitializedError     ValueError: call `hvd.init()` first
NotSupportedError       NotImplementedError: a part of Horovod that is not supported
StepOrderError          AssertionError: backward, `step` and `zero_grad` in an order that loses gradients

Conversion of communication errors to Horovod's, and exchange of error details between ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from axon_nb.comm import ProcessGroup
from axon_nb.errors import AxonError, UsageError

__all__ = [
    "HorovodInternalError",
    "NotInitializedError",
    "NotSupportedError",
    "StepOrderError",
    "converted_errors",
    "gather_objects",
]


class HorovodInternalError(AxonError, RuntimeError):
    """A collective failed, or ranks called it differently; raised on every rank that called it."""


class NotInitializedError(UsageError):
    """Horovod has not been initialized."""

    def __init__(self) -> None:
        super().__init__("Horovod has not been initialized; use hvd.init().")


class NotSupportedError(UsageError, NotImplementedError):
    """A part of Horovod that is not supported; the message names an alternative."""


class StepOrderError(AxonError, AssertionError):
    """Backward, `step` and `zero_grad` were called in an order that would lose gradients."""


@contextlib.contextmanager
def converted_errors(kind: str, name: str = "") -> Iterator[None]:
    """Convert torch's errors from broken connections to Horovod's error.

    Other exception types, such as those that abort a cell, pass through.

    Raises:
        HorovodInternalError: the communication failed.
    """
    try:
        yield
    except RuntimeError as error:
        if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
            raise
        what = f"hvd.{kind} {name!r}" if name else f"Horovod's {kind}"
        first = str(error).strip().splitlines()[-1][-200:]
        raise HorovodInternalError(
            f"{what} failed because a rank died or is unreachable ({first}); see that rank's own error."
        ) from error


def gather_objects(group: ProcessGroup, value: Any) -> list[Any]:
    """Gather an object from every rank of the group, in rank order; collective."""
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, value, group=group.torch_group)
    return gathered
