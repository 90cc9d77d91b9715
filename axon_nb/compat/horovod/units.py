"""Which gradients are reduced together, and under which names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from typing import Any

import torch

from axon_nb.compat.horovod.gradients import Unit
from axon_nb.errors import UsageError

__all__ = ["check_names", "make_units"]


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
