"""Parameters of the tensor-parallel layers written by hand: plain tensors, of which each rank of a group has a part."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from axon_nb.engine.sharded import loaded

__all__ = ["Cut", "cut_parameters"]

_LINEAR = "axon_nb.parallel.tensor.linear"
_BLOCK = ("axon_nb.parallel.tensor.block", "TensorParallelBlock")
_NORM = ("axon_nb.parallel.tensor.norm", "SequenceParallelNorm")


@dataclass(frozen=True, slots=True)
class Cut:
    """How a layer holds one of its parameters."""

    group: Any
    """The ranks that share the layer: a group of `axon_nb.comm`."""
    dim: int | None
    """Along which dim the parameter is cut, in equal parts in the order of the group's ranks; None: each has it all."""


def cut_parameters(modules: Iterable[Any]) -> dict[int, Cut]:
    """The parameters that such layers among these modules hold, by `id`; those of layers on one rank are left out."""
    linear = (loaded(_LINEAR, "ColumnParallelLinear"), loaded(_LINEAR, "RowParallelLinear"))
    block, norm = loaded(*_BLOCK), loaded(*_NORM)
    found: dict[int, Cut] = {}
    for module in modules:
        if issubclass(type(module), linear):
            dims = module.shard_dims
            own = dict(module.named_parameters(recurse=False))
            found |= {id(own[name]): Cut(module.group, dims.get(name)) for name in own}
        elif issubclass(type(module), block):
            whole = [parameter for part in (module.norm_1, module.norm_2) for parameter in part.parameters()]
            found |= {id(parameter): Cut(module.attention.group, None) for parameter in whole}
        elif issubclass(type(module), norm):
            found |= {id(parameter): Cut(module.group, None) for parameter in module.parameters(recurse=False)}
    return {key: cut for key, cut in found.items() if cut.group.size() > 1}
