"""Determine how much state an optimizer keeps per parameter element, by running it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from axon_nb.errors import UsageError

_PROBE = (2, 3)
_HINT = "pass the elements of state per parameter element: states_per_param=…"
_IMPLEMENTATION_OPTIONS = ("capturable", "foreach", "fused")


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer that has not been created yet."""

    make: Callable[..., Optimizer] = torch.optim.Adam
    """Class of the optimizer."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the optimizer."""

    def bytes_per_element(self, dtype: torch.dtype, *, trained: bool = True) -> int:
        """Return the bytes of state per element of a parameter of this dtype, from one step on a tiny parameter.

        Parameters that are not trained have no state, except with optimizers that create it at once, such as Adagrad.
        Values per parameter, such as Adam's step count, are not included.

        Raises:
            UsageError: the states and parameters have different shapes, or a step needs more than gradients.
        """
        probe = nn.Parameter(torch.zeros(_PROBE, dtype=dtype, device="cpu"))
        probe.grad = torch.ones_like(probe) if trained else None
        # Options that only choose an implementation change no state, but need devices that the probe is not on.
        options = {name: value for name, value in self.options.items() if name not in _IMPLEMENTATION_OPTIONS}
        optimizer = self.make([probe], **options)
        # Not `optimizer.step()`: code that counts optimizer steps must not count this one.
        step = type(optimizer).step
        try:
            getattr(step, "__wrapped__", step)(optimizer)
        except TypeError as error:
            raise UsageError(f"{type(optimizer).__name__} needs more than gradients for a step; {_HINT}") from error
        states = [state for state in optimizer.state[probe].values() if isinstance(state, torch.Tensor) and state.ndim]
        if any(tuple(state.shape) != _PROBE for state in states):
            raise UsageError(f"{type(optimizer).__name__} has states and parameters of different shapes; {_HINT}")
        return sum(state.itemsize for state in states)


def local_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that holds the states: for ZeroRedundancyOptimizer, its local one."""
    inner: Optimizer = getattr(optimizer, "optim", optimizer)
    return inner


def optimizer_states(optimizer: Optimizer | None) -> list[torch.Tensor]:
    """Return the states that an optimizer holds on this rank, except scalars."""
    if optimizer is None:
        return []
    inner = local_optimizer(optimizer)
    values = [value for state in inner.state.values() for value in state.values()]
    return [value for value in values if isinstance(value, torch.Tensor) and value.ndim > 0]
