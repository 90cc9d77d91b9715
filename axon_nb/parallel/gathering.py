"""Whole parameters of an FSDP model, to read and to change: what is changed in them is kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

__all__ = ["Gathering", "fill", "local_part", "whole"]


class Gathering:
    """Makes the parameters of a model whole on every rank, and sharded again.

    Args:
        model: Made by `fully_shard`.
        mesh: Its mesh; the last dimension is that of the shards.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self._model = model
        self._mesh = mesh
        self._units = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
        self._shards: dict[str, tuple[torch.Tensor, tuple[int, int]]] | None = None
        for unit in self._units:
            unit.register_forward_pre_hook(self._before_forward, prepend=True)

    def gather(self) -> None:
        """Make parameters whole on every rank; collective."""
        if self._shards is None:
            self.reshard()  # what a forward has left whole may be older than an optimizer's step after it
            self._shards = {name: (p, _changes(p)) for name, p in self._model.named_parameters()}
        for unit in self._units:
            unit.unshard()

    def reshard(self) -> None:
        """Keep only this rank's part, with what was changed in the whole since `gather`."""
        self._keep_changes()
        self._shards = None
        for unit in self._units:
            unit.reshard()

    def _before_forward(self, *_: Any) -> None:
        self._keep_changes()  # after a forward units are sharded again

    def _keep_changes(self) -> None:
        shards = self._shards or {}
        for name, parameter in self._model.named_parameters() if shards else ():
            shard, version = shards.get(name, (parameter, None))
            # A forward or backward in between has sharded units again; and a part that was changed is newer.
            if parameter is not shard and _changes(shard) == version:
                self._take_over(shard, parameter)
                shards[name] = shard, _changes(shard)

    @torch.no_grad()
    def _take_over(self, shard: torch.Tensor, parameter: torch.Tensor) -> None:
        part, full = local_part(shard), local_part(parameter)
        if not part.numel():
            return
        ranks = self._mesh.size(self._mesh.ndim - 1)
        start = self._mesh.get_local_rank(self._mesh.ndim - 1) * -(-full.shape[0] // ranks)
        own = full.narrow(0, start, part.shape[0]).to(part.device)
        # Where nothing was changed the part stays: it may be more precise than the whole that was gathered.
        changed = own != part.to(own.dtype)
        if changed.any():
            part.copy_(torch.where(changed, own.to(part.dtype), part))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the whole tensor, on the host of every rank; collective for a sharded one."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().to("cpu", copy=True)
    mesh, local = tensor.device_mesh, local_part(tensor)
    if local.device.type != mesh.device_type:
        # Offloaded to where the group may not reach.
        local = local.to(mesh.device_type)
        placements, shape, stride = tensor.placements, tensor.shape, tensor.stride()
        tensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    full: torch.Tensor = tensor.full_tensor()
    return full.detach().cpu()


@torch.no_grad()
def fill(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a whole value, which every rank has, into a tensor or into this rank's part of it."""
    if isinstance(tensor, DTensor):
        value = value.to(tensor.device_mesh.device_type)
        value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
    local_part(tensor).copy_(local_part(value))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of it, outside of autograd."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _changes(tensor: torch.Tensor) -> tuple[int, int]:
    # Operations on a DTensor count in itself alone, those on what it holds in that.
    return tensor._version, local_part(tensor)._version
