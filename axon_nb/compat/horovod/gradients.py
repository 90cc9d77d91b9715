"""Reduction of an optimizer's gradients during backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from axon_nb.comm import CommError
from axon_nb.compat.horovod.compression import Compressor
from axon_nb.compat.horovod.errors import HorovodInternalError, StepOrderError
from axon_nb.compat.horovod.gathering import sparse_allreduce_async
from axon_nb.compat.horovod.handles import synchronize
from axon_nb.compat.horovod.process_sets import ProcessSet, channel_of
from axon_nb.compat.horovod.reduce_ops import Op
from axon_nb.compat.horovod.reductions import allreduce_async_, grouped_allreduce_async_
from axon_nb.compat.horovod.state import current

__all__ = ["GradientReduction", "How", "Unit"]

_AHEAD = 2
"""Rounds that a hook may leave unread, so that reductions start during backward even with few parameters left."""

# The hook of each parameter: that of the last optimizer that was made distributed with it.
_hooks: Any = WeakIdKeyDictionary()


@dataclass(frozen=True, slots=True)
class How:
    """Reduction options common to all gradients."""

    compression: type[Compressor]
    op: Op
    predivide: float
    """Gradients are divided by it before the sum and multiplied by it afterwards."""
    sparse_as_dense: bool
    process_set: ProcessSet


@dataclass(slots=True, eq=False)
class Unit:
    """Parameters whose gradients are reduced together."""

    name: str
    parameters: list[torch.Tensor]
    grouped: bool = False
    arrived: int = 0
    """How many of them have a complete gradient."""
    wait: Callable[[], None] | None = None
    """Waits for the reduction and stores its result; None before it starts."""
    counts: list[int] = field(default_factory=list)
    """How often backward has added to each parameter's gradient."""


class GradientReduction:
    """Reduces the gradients of one optimizer.

    Args:
        units: Parameters that are reduced together.
        how: How they are reduced.
        passes: Number of backward passes per reduction.
    """

    def __init__(self, units: Sequence[Unit], how: How, passes: int) -> None:
        self._units = list(units)
        self._how = how
        self._places: dict[torch.Tensor, tuple[Unit, int]] = {}
        self._era = current().era
        self.passes = passes
        for unit in self._units:
            self._follow(unit)

    def add(self, unit: Unit) -> None:
        """Add parameters."""
        self._units.append(unit)
        self._follow(unit)

    def _follow(self, unit: Unit) -> None:
        unit.counts = [0] * len(unit.parameters)
        own = weakref.ref(self)

        def hook(parameter: torch.Tensor) -> None:
            reduction = own()
            if reduction is not None:
                reduction._arrived(parameter)

        for place, parameter in enumerate(unit.parameters):
            self._places[parameter] = unit, place
            if (earlier := _hooks.pop(parameter, None)) is not None:
                earlier.remove()
            _hooks[parameter] = parameter.register_post_accumulate_grad_hook(hook)

    @property
    def begun(self) -> bool:
        """Whether there are reductions that were not waited for."""
        self._freshen()
        return any(unit.wait is not None or any(unit.counts) for unit in self._units)

    def forget(self) -> None:
        """Reset: the next backward counts as the first."""
        for unit in self._units:
            unit.wait, unit.arrived, unit.counts = None, 0, [0] * len(unit.parameters)

    def _freshen(self) -> None:
        # Reductions that were under way when a cell was ended are lost on all ranks.
        if (era := current().era) != self._era:
            self._era = era
            self.forget()

    def _arrived(self, parameter: torch.Tensor) -> None:
        self._freshen()
        unit, place = self._places[parameter]
        if unit.counts[place] >= self.passes:
            raise StepOrderError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                f"backward_passes_per_step, which is {self.passes}, to accumulate gradients locally."
            )
        unit.counts[place] += 1
        if unit.counts[place] == self.passes:
            unit.arrived += 1
            if unit.arrived == len(unit.parameters):
                self._begin(unit)
                channel_of(self._how.process_set).progress(ahead=_AHEAD)

    def finish(self) -> None:
        """Reduce the remaining gradients and wait for all; a gradient missing on some ranks counts as zero."""
        self._freshen()
        for unit in self._units:
            if unit.wait is None:
                self._begin(unit)
        failure: Exception | None = None
        for unit in self._units:
            assert unit.wait is not None
            try:
                unit.wait()
            except (HorovodInternalError, CommError) as error:
                failure = failure or error
        self.forget()
        if failure is not None:
            raise failure

    @torch.no_grad()
    def _begin(self, unit: Unit) -> None:
        how = self._how
        gradients: list[torch.Tensor] = []
        for parameter in unit.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        if gradients[0].is_sparse and not how.sparse_as_dense and not unit.grouped:
            result = sparse_allreduce_async(gradients[0], unit.name, how.op, how.process_set)
            unit.wait = lambda: _replace(unit.parameters[0], result())
            return
        packed = [how.compression.compress(item.to_dense() if item.is_sparse else item) for item in gradients]
        values = [value for value, _ in packed]
        before, after = 1.0 / how.predivide, how.predivide
        options: Any = {"name": unit.name, "op": how.op, "prescale_factor": before, "postscale_factor": after}
        if unit.grouped:
            handle = grouped_allreduce_async_(values, process_set=how.process_set, **options)
        else:
            handle = allreduce_async_(values[0], process_set=how.process_set, **options)

        def wait() -> None:
            results = synchronize(handle)
            results = results if unit.grouped else [results]
            for parameter, result, (_, context) in zip(unit.parameters, results, packed, strict=True):
                _put(parameter, how.compression.decompress(result, context))

        unit.wait = wait


@torch.no_grad()
def _put(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Set `value` as the gradient, in the existing tensor if possible."""
    gradient = parameter.grad
    if gradient is value:
        return
    if gradient is None:
        parameter.grad = value.to(parameter.dtype)
    elif gradient.is_sparse:
        parameter.grad = value.to_sparse(gradient.sparse_dim())
    else:
        gradient.copy_(value)


def _replace(parameter: torch.Tensor, value: torch.Tensor) -> None:
    parameter.grad = value
