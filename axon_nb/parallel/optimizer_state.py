"""How much state an optimizer keeps for an element of a parameter: asked of the optimizer itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from axon_nb.comm.errors import CommError

__all__ = ["OptimizerKind", "held_states", "own_optimizer"]

_PROBE = (2, 3)
_SAY = "say how many elements of state a parameter's element has: states_per_param=…"
_WAYS = ("capturable", "foreach", "fused")


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer that is not made yet."""

    make: Callable[..., Optimizer] = torch.optim.Adam
    """Its class."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Its keyword arguments."""

    def bytes_per_element(self, dtype: torch.dtype, *, trained: bool = True) -> int:
        """Bytes of state for each element of a parameter of this dtype: one step on a tiny one.

        A parameter that is not trained has none, but with optimizers that make their states at once, as Adagrad.
        Numbers that belong to a parameter as a whole, such as Adam's count of steps, are not in it.

        Raises:
            CommError: its states have other shapes than the parameters, or its step needs more than gradients.
        """
        probe = nn.Parameter(torch.zeros(_PROBE, dtype=dtype))
        probe.grad = torch.ones_like(probe) if trained else None
        # Whether many tensors are computed at once changes no state, but needs devices that the probe is not on.
        options = {
            name: value for name, value in self.options.items() if name not in ("capturable", "foreach", "fused")
        }
        optimizer = self.make([probe], **options)
        # Not `optimizer.step()`: whoever counts the steps of optimizers is not to count this one.
        step = type(optimizer).step
        try:
            getattr(step, "__wrapped__", step)(optimizer)
        except TypeError as error:
            raise CommError(f"{type(optimizer).__name__} takes steps that cannot be tried; {_SAY}") from error
        states = [state for state in optimizer.state[probe].values() if isinstance(state, torch.Tensor) and state.ndim]
        if any(tuple(state.shape) != _PROBE for state in states):
            raise CommError(f"{type(optimizer).__name__} keeps states of other shapes than its parameters; {_SAY}")
        return sum(state.itemsize for state in states)


def own_optimizer(optimizer: Optimizer) -> Optimizer:
    """The one that has the states: ZeroRedundancyOptimizer steps one for this rank's part."""
    own: Optimizer = getattr(optimizer, "optim", optimizer)
    return own


def held_states(optimizer: Optimizer | None) -> list[torch.Tensor]:
    """The states that an optimizer holds on this rank, without those of a single number."""
    if optimizer is None:
        return []
    # ZeroRedundancyOptimizer holds them in the optimizer of its own part.
    own = getattr(optimizer, "optim", optimizer)
    values = [value for state in own.state.values() for value in state.values()]
    return [value for value in values if isinstance(value, torch.Tensor) and value.ndim > 0]
