"""Pipeline stages: given by the user, or split from a Sequential, at given names or into parts of about equal cost."""

from __future__ import annotations

import itertools
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from axon_nb.comm.collectives.movement import broadcast
from axon_nb.comm.group import ProcessGroup
from axon_nb.comm.types import Backend
from axon_nb.errors import UsageError

Cost = Literal["params", "time"] | Callable[[nn.Module], float]
"""What to balance: the number of parameters, the measured time, or a function of one module."""


class Section(nn.Sequential):
    """Consecutive children of a larger Sequential, under their names there."""


def split_sections(model: nn.Module, starts: Sequence[str]) -> list[Section]:
    """Split the children of a Sequential into sections; each but the first starts at one of `starts`.

    Raises:
        UsageError: the model is not a Sequential, or has no children of these names in this order.
    """
    children = _children(model)
    names = list(children)
    unknown = [name for name in starts if name not in names]
    if unknown:
        raise UsageError(f"at: the model has no child {unknown[0]!r}; its children are {', '.join(names)}.")
    bounds = [0, *(names.index(name) for name in starts), len(names)]
    if any(first >= second for first, second in itertools.pairwise(bounds)):
        raise UsageError(
            f"at must list children in the model's order, without the first one ({names[0]}), as each starts the next "
            f"stage; got {list(starts)}."
        )
    items = list(children.items())
    return [Section(OrderedDict(items[first:second])) for first, second in itertools.pairwise(bounds)]


def child_costs(model: nn.Module, by: Cost, sample: Any = None) -> dict[str, float]:
    """Return the cost of each child of a Sequential.

    Args:
        model: The model.
        by: What to count.
        sample: An input of the model for "time", such as one microbatch.

    Raises:
        UsageError: `by` is unknown, or is "time" without a sample.
    """
    children = _children(model)
    if callable(by):
        return {name: float(by(child)) for name, child in children.items()}
    if by == "params":
        return {name: float(sum(p.numel() for p in child.parameters())) for name, child in children.items()}
    if by != "time":
        raise UsageError(f"split must be 'params', 'time' or a function that returns the cost of a module; got {by!r}.")
    if sample is None:
        raise UsageError("split='time' needs sample=, such as the inputs of one microbatch, to measure the model.")
    return dict(zip(children, _measure_seconds(list(children.values()), sample), strict=True))


def balance(costs: Sequence[float], parts: int) -> list[int]:
    """Return the start of each of `parts` consecutive parts so that the most expensive part costs least.

    Among equal solutions, the costs are as even as possible (least sum of squares). No part is empty.

    Raises:
        UsageError: there are fewer costs than parts, or one is negative.
    """
    if not 1 <= parts <= len(costs):
        raise UsageError(f"num_stages must be 1 to {len(costs)}, the number of modules; got {parts}.")
    if any(not cost >= 0 for cost in costs):
        raise UsageError(f"costs must be 0 or more; got {list(costs)}.")
    sums = [0.0, *itertools.accumulate(costs)]
    highest, _ = _best_split(sums, parts, lambda cost: cost, max)
    limit = highest * (1 + 1e-9)
    _, starts = _best_split(sums, parts, lambda cost: cost * cost if cost <= limit else math.inf, lambda a, b: a + b)
    return starts


def _children(model: nn.Module) -> dict[str, nn.Module]:
    if not isinstance(model, nn.Sequential):
        raise UsageError(
            f"{type(model).__name__} is not an nn.Sequential, so the order of its children is unknown. Pass the stages "
            "themselves: Pipeline.from_modules([first, second, …])."
        )
    return dict(model.named_children())


def _best_split(
    sums: list[float], parts: int, price: Callable[[float], float], join: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """Find the best split by dynamic programming: its value, and the start of each part."""
    count = len(sums) - 1
    best = [[math.inf] * (count + 1) for _ in range(parts + 1)]
    start = [[0] * (count + 1) for _ in range(parts + 1)]
    best[0][0] = 0.0
    for part in range(1, parts + 1):
        for end in range(part, count - parts + part + 1):
            for begin in range(part - 1, end):
                value = join(best[part - 1][begin], price(sums[end] - sums[begin]))
                if value < best[part][end]:
                    best[part][end], start[part][end] = value, begin
    starts, end = [], count
    for part in range(parts, 0, -1):
        end = start[part][end]
        starts.append(end)
    return best[parts][count], starts[::-1]


def _measure_seconds(children: list[nn.Module], sample: Any, repeats: int = 3) -> list[float]:
    """Measure forward and backward of each child, in seconds; the minimum of several runs."""
    buffers = [buffer for child in children for buffer in child.buffers()]
    saved = [buffer.clone() for buffer in buffers]
    shortest = [math.inf] * len(children)
    with torch.random.fork_rng(), torch.enable_grad():
        for _ in range(repeats + 1):
            value = sample
            for number, child in enumerate(children):
                seconds, value = _time_once(child, value)
                shortest[number] = min(shortest[number], seconds)
    with torch.no_grad():
        for buffer, before in zip(buffers, saved, strict=True):
            buffer.copy_(before)
    return shortest


def _time_once(child: nn.Module, value: Any) -> tuple[float, Any]:
    """Run one forward and backward; return the seconds and the output."""
    leaves = tree_map(_as_leaf, value)
    args = leaves if isinstance(leaves, tuple) else (leaves,)
    sources = [tensor for tensor in (*_tensors(args), *child.parameters()) if tensor.requires_grad]
    _wait_for_device()
    start = time.perf_counter()
    output = child(*args)
    outputs = [tensor for tensor in _tensors(output) if tensor.requires_grad]
    if sources and outputs:
        torch.autograd.grad(outputs, sources, [torch.ones_like(out) for out in outputs], allow_unused=True)
    _wait_for_device()
    return time.perf_counter() - start, tree_map(_as_leaf, output)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _as_leaf(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(value.is_floating_point())


def _wait_for_device() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def balanced_stage_starts(
    model: nn.Module, by: Cost, num_stages: int, *, sample: Any, group: ProcessGroup
) -> list[str]:
    """Return the children that start a stage, except the first; the same on all ranks. Collective for "time"."""
    costs = child_costs(model, by, sample)
    values = list(costs.values())
    if by == "time" and group.size() > 1:
        own = torch.tensor(values, dtype=torch.float64, device="cpu")
        values = broadcast(own.cuda() if group.backend is Backend.NCCL else own, group=group).tolist()
    return [list(costs)[start] for start in balance(values, num_stages)[1:]]


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """A module and its device: `Pipeline([PipelineStage(first, "cuda:0"), PipelineStage(second, "cuda:1")])`."""

    module: nn.Module | Callable[[], nn.Module]
    """The module, or a function without arguments that creates it; only called on the rank that holds the stage."""
    device: torch.device | str | None = None
    """None: where its parameters are."""

    def make(self) -> nn.Module:
        """Return the module, creating it if necessary."""
        return self.module if isinstance(self.module, nn.Module) else self.module()


def stage_device(device: torch.device | str | None, stage: nn.Module, group: ProcessGroup) -> torch.device:
    """Return a stage's device: the given one, or that of its parameters; with NCCL, this rank's GPU."""
    if device is not None:
        return torch.device(device)
    parameter = next(stage.parameters(), None)
    if group.backend is Backend.NCCL and (parameter is None or not parameter.is_cuda):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if parameter is None else parameter.device


def check_no_shared_parameters(stages: Sequence[PipelineStage]) -> None:
    """Check that no two stages share a parameter: each rank would train its own copy.

    Raises:
        UsageError: two stages share a parameter.
    """
    owner: dict[int, tuple[int, str]] = {}
    for index, stage in enumerate(stages):
        if not isinstance(stage.module, nn.Module):
            continue
        for name, parameter in stage.module.named_parameters():
            first, first_name = owner.setdefault(id(parameter), (index, name))
            if first != index:
                raise UsageError(
                    f"{name} of stage {index} is also {first_name} of stage {first}. Stages cannot share parameters, "
                    "as each rank would train its own copy."
                )
