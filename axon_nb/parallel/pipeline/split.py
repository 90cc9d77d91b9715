"""Cutting a sequence of modules into stages: at given names, or so that stages cost about the same."""

from __future__ import annotations

import itertools
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from axon_nb.comm.group import ProcessGroup
from axon_nb.comm.kinds import Backend
from axon_nb.comm.move import broadcast
from axon_nb.errors import UsageError

__all__ = ["Cost", "Section", "balanced", "balanced_starts", "costs_of", "sections"]

Cost = Literal["params", "time"] | Callable[[nn.Module], float]
"""What stages are balanced by: the number of parameters, the measured time, or a function of one module."""


class Section(nn.Sequential):
    """Consecutive modules of a larger one, under the names that they have there."""


def sections(model: nn.Module, starts: Sequence[str]) -> list[Section]:
    """The children of a Sequential, in sections; each but the first begins at one of `starts`.

    Raises:
        UsageError: the model is no Sequential, or has no children of these names in this order.
    """
    children = _children(model)
    names = list(children)
    unknown = [name for name in starts if name not in names]
    if unknown:
        raise UsageError(f"at={unknown[0]!r}: the model's children are {', '.join(names)}.")
    cuts = [0, *(names.index(name) for name in starts), len(names)]
    if any(first >= second for first, second in itertools.pairwise(cuts)):
        raise UsageError(
            f"at={list(starts)}: each name is where the next stage begins, so they are in the model's order, and the "
            f"first child, {names[0]}, is none of them."
        )
    items = list(children.items())
    return [Section(OrderedDict(items[first:second])) for first, second in itertools.pairwise(cuts)]


def costs_of(model: nn.Module, by: Cost, sample: Any = None) -> dict[str, float]:
    """The cost of each child of a Sequential.

    Args:
        model: The model.
        by: What is counted.
        sample: For "time": an input of the model, such as one microbatch.

    Raises:
        UsageError: `by` is unknown, or "time" without a sample.
    """
    children = _children(model)
    if callable(by):
        return {name: float(by(child)) for name, child in children.items()}
    if by == "params":
        return {name: float(sum(p.numel() for p in child.parameters())) for name, child in children.items()}
    if by != "time":
        raise UsageError(f"split={by!r}: it is 'params', 'time', or a function that gives the cost of one module.")
    if sample is None:
        raise UsageError("split='time' runs the model once: give it sample=, such as the inputs of one microbatch.")
    return dict(zip(children, _seconds(list(children.values()), sample), strict=True))


def balanced(costs: Sequence[float], parts: int) -> list[int]:
    """Where each of `parts` consecutive parts begins, so that the dearest one costs least.

    Among equals the costs are as even as can be (least sum of squares); no part is empty.

    Raises:
        UsageError: there are fewer costs than parts, or one is negative.
    """
    if not 1 <= parts <= len(costs):
        raise UsageError(f"{len(costs)} modules cannot be cut into {parts} stages: a stage has at least one.")
    if any(not cost >= 0 for cost in costs):
        raise UsageError(f"the costs are {list(costs)}: each is 0 or more.")
    sums = [0.0, *itertools.accumulate(costs)]
    dearest, _ = _cut(sums, parts, lambda cost: cost, max)
    limit = dearest * (1 + 1e-9)
    _, starts = _cut(sums, parts, lambda cost: cost * cost if cost <= limit else math.inf, lambda a, b: a + b)
    return starts


def _children(model: nn.Module) -> dict[str, nn.Module]:
    if not isinstance(model, nn.Sequential):
        raise UsageError(
            f"{type(model).__name__} is no nn.Sequential, so it is not known in which order its parts are called: give "
            "the stages themselves, Pipeline.from_modules([first, second, …])."
        )
    return dict(model.named_children())


def _cut(
    sums: list[float], parts: int, price: Callable[[float], float], join: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """The best cut by dynamic programming: its value, and where its parts begin."""
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


def _seconds(children: list[nn.Module], sample: Any, repeats: int = 3) -> list[float]:
    """Seconds that each takes for forward and backward; the shortest of some tries."""
    buffers = [buffer for child in children for buffer in child.buffers()]
    kept = [buffer.clone() for buffer in buffers]
    taken = [math.inf] * len(children)
    with torch.random.fork_rng(), torch.enable_grad():
        for _ in range(repeats + 1):
            value = sample
            for number, child in enumerate(children):
                seconds, value = _once(child, value)
                taken[number] = min(taken[number], seconds)
    with torch.no_grad():
        for buffer, before in zip(buffers, kept, strict=True):
            buffer.copy_(before)
    return taken


def _once(child: nn.Module, value: Any) -> tuple[float, Any]:
    """Seconds of a forward and a backward, and the output."""
    given = tree_map(_leaf, value)
    args = given if isinstance(given, tuple) else (given,)
    sources = [tensor for tensor in (*_tensors(args), *child.parameters()) if tensor.requires_grad]
    _wait_for_device()
    start = time.perf_counter()
    output = child(*args)
    outputs = [tensor for tensor in _tensors(output) if tensor.requires_grad]
    if sources and outputs:
        torch.autograd.grad(outputs, sources, [torch.ones_like(out) for out in outputs], allow_unused=True)
    _wait_for_device()
    return time.perf_counter() - start, tree_map(_leaf, output)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _leaf(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(value.is_floating_point())


def _wait_for_device() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def balanced_starts(model: nn.Module, by: Cost, num_stages: int, *, sample: Any, group: ProcessGroup) -> list[str]:
    """The children that begin a stage, but for the first; the same on all ranks of the group. For "time" collective."""
    costs = costs_of(model, by, sample)
    values = torch.tensor(list(costs.values()), dtype=torch.float64)
    if by == "time" and group.size() > 1:
        values = broadcast(values.cuda() if group.backend is Backend.NCCL else values, group=group).cpu()
    return [list(costs)[start] for start in balanced(values.tolist(), num_stages)[1:]]
