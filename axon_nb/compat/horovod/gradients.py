"""Reduction of an optimizer's gradients during backward.

Which gradients are reduced together, and under which names.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from axon_nb.comm import CommError
from axon_nb.compat.horovod.allgather import sparse_allreduce_async
from axon_nb.compat.horovod.allreduce import allreduce_async_, grouped_allreduce_async_
from axon_nb.compat.horovod.compression import Compressor
from axon_nb.compat.horovod.runtime.errors import HorovodInternalError, StepOrderError
from axon_nb.compat.horovod.runtime.handles import synchronize
from axon_nb.compat.horovod.runtime.process_sets import ProcessSet, channel_of
from axon_nb.compat.horovod.runtime.reduce_ops import Op
from axon_nb.compat.horovod.runtime.state import current
from axon_nb.errors import UsageError

__all__ = ["GradientReduction", "How", "Unit", "check_names", "make_units"]

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
        # If a cell is aborted, its pending reductions are lost on all ranks.
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


def check_names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[torch.Tensor, str]:
    """Return the names of an optimizer's parameters.

    Raises:
        UsageError: names are duplicate or missing.
    """
    if named_parameters is None:
        return {
            parameter: f"allreduce.noname.{i}.{j}"
            for i, group in enumerate(optimizer.param_groups)
            for j, parameter in enumerate(group["params"])
        }
    given: list[Any] = list(named_parameters)
    if not all(isinstance(item, tuple) and len(item) == 2 for item in given):
        raise UsageError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    twice = sorted(name for name, count in Counter(name for name, _ in given).items() if count > 1)
    if twice:
        raise UsageError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}; of several "
            "models give each a prefix of its own."
        )
    names = {parameter: name for name, parameter in given}
    absent = [parameter for parameter in _parameters(optimizer) if parameter not in names]
    if absent:
        shapes = ", ".join(str(tuple(parameter.shape)) for parameter in absent)
        raise UsageError(
            "named_parameters was specified, but one or more model parameters were not named: those of shape "
            f"{shapes}; give model.named_parameters() of the whole model, or leave it out."
        )
    return names


def make_units(
    optimizer: torch.optim.Optimizer,
    names: dict[torch.Tensor, str],
    groups: int | Sequence[Sequence[torch.Tensor]] | None,
) -> list[Unit]:
    """Group the optimizer's parameters that require gradients.

    Raises:
        UsageError: the groups are invalid.
    """
    wanted = [parameter for parameter in _parameters(optimizer) if parameter.requires_grad]
    chosen = _in_groups(wanted, groups)
    together = {parameter for group in chosen for parameter in group}
    units = [Unit(names[group[0]], group, grouped=True) for group in chosen if group]
    return units + [Unit(names[parameter], [parameter]) for parameter in wanted if parameter not in together]


def _in_groups(
    wanted: list[torch.Tensor], groups: int | Sequence[Sequence[torch.Tensor]] | None
) -> list[list[torch.Tensor]]:
    if groups is None or groups == 0:
        return []
    if isinstance(groups, int):
        if groups < 0:
            raise UsageError(
                f"groups={groups}: groups should be a non-negative integer or a list of list of torch.Tensor."
            )
        each, more = divmod(len(wanted), groups)
        ends = [number * each + min(number, more) for number in range(groups + 1)]
        return [wanted[start:end] for start, end in pairwise(ends)]
    listed = list(chain.from_iterable(groups))
    if not all(isinstance(item, torch.Tensor) for item in listed):
        raise UsageError("groups must consist of torch.Tensor: lists of parameters.")
    if len({id(item) for item in listed}) < len(listed):
        raise UsageError("A parameter can only appear once in groups.")
    there = set(wanted)
    return [[item for item in group if item in there] for group in groups]


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
