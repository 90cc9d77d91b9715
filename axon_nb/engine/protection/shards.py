"""The shards of FSDP2 models in a slot: a replacement shards the model again, and then gets the shards it had."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from axon_nb.engine.elastic import fsdp
from axon_nb.engine.elastic.replacement import replace_parameters
from axon_nb.engine.elastic.sharded_states import fsdp_models

__all__ = ["Shards", "adopt_shards", "own_shards"]

_Pieces = dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor | None]]


@dataclass(frozen=True, slots=True)
class Shards:
    """What this rank holds of the parameters that FSDP2 manages."""

    split: dict[int, Any]
    """By the parameter's `id`, mesh and placements of the DTensor that it was before; None: a plain tensor."""
    pieces: _Pieces
    """Shard and gradient, by variable and parameter."""


def own_shards() -> Shards:
    """Return the shards of this rank."""
    split, pieces = {}, _Pieces()
    for variable, model in fsdp_models().items():
        for name, group, record in fsdp.parameters(model):
            parameter = record.sharded_param
            gradient = parameter.grad
            split[id(parameter)] = _split_before(parameter, group) if record.is_dtensor else None
            local = gradient.to_local().detach() if gradient is not None else None
            pieces[variable, name] = parameter.to_local().detach(), local
    return Shards(split, pieces)


def _split_before(parameter: Any, group: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return mesh and placements of the DTensor that FSDP2 has sharded: those that follow FSDP2's own."""
    mesh, own = parameter.device_mesh, group.mesh_info.mesh.ndim
    return mesh._get_root_mesh()[mesh.mesh_dim_names[own:]], tuple(parameter.placements[own:])


def adopt_shards(pieces: Mapping[tuple[str, str], tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    """Give the parameters of FSDP2 models, which have no data yet, these shards; does not communicate."""
    replaced = {}
    for variable, model in fsdp_models().items():
        for name, _, record in list(fsdp.parameters(model)):
            before = record.sharded_param
            replaced[id(before)] = before, fsdp.set_shard(record, *pieces[variable, name])
    replace_parameters(replaced)
