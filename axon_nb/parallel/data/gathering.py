"""Gathers the full parameters of an FSDP model, keeps in-place changes, and runs functions when backward starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_leaves


class ParameterGatherer:
    """Gathers the full parameters of a model on every rank, and shards them again.

    Args:
        model: A model processed by `fully_shard`.
        mesh: Its mesh; the last dimension is the shard dimension.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self._model = model
        self._mesh = mesh
        self._units = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
        self._shards: dict[str, tuple[torch.Tensor, tuple[int, int]]] | None = None
        for unit in self._units:
            unit.register_forward_pre_hook(self._before_forward, prepend=True)

    def gather(self) -> None:
        """Gather full parameters on every rank. Collective."""
        if self._shards is None:
            self.reshard()  # parameters left unsharded by a forward may be older than a later optimizer step
            self._shards = {name: (p, _versions(p)) for name, p in self._model.named_parameters()}
        for unit in self._units:
            unit.unshard()

    def reshard(self) -> None:
        """Keep only this rank's shard, including changes made since `gather`."""
        self._save_changes()
        self._shards = None
        for unit in self._units:
            unit.reshard()

    def _before_forward(self, *_: Any) -> None:
        self._save_changes()  # units are sharded again after a forward

    def _save_changes(self) -> None:
        shards = self._shards or {}
        for name, parameter in self._model.named_parameters() if shards else ():
            shard, version = shards.get(name, (parameter, None))
            # A forward or backward in between has resharded units; and a shard changed since then is newer.
            if parameter is not shard and _versions(shard) == version:
                self._copy_changes(shard, parameter)
                shards[name] = shard, _versions(shard)

    @torch.no_grad()
    def _copy_changes(self, shard: torch.Tensor, parameter: torch.Tensor) -> None:
        part, full = local_shard(shard), local_shard(parameter)
        if not part.numel():
            return
        ranks = self._mesh.size(self._mesh.ndim - 1)
        start = self._mesh.get_local_rank(self._mesh.ndim - 1) * -(-full.shape[0] // ranks)
        local = full.narrow(0, start, part.shape[0]).to(part.device)
        # Unchanged elements keep the shard's value, which may be more precise than the gathered one.
        changed = local != part.to(local.dtype)
        if changed.any():
            part.copy_(torch.where(changed, local.to(part.dtype), part))


def full_value(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the full tensor in host memory, on every rank. Collective for a sharded tensor."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().to("cpu", copy=True)
    mesh, local = tensor.device_mesh, local_shard(tensor)
    if local.device.type != mesh.device_type:
        # Offloaded to a device that the group cannot access.
        local = local.to(mesh.device_type)
        placements, shape, stride = tensor.placements, tensor.shape, tensor.stride()
        tensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    full: torch.Tensor = tensor.full_tensor()
    return full.detach().cpu()


@torch.no_grad()
def copy_full_value(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a full value, present on every rank, into `tensor` or into this rank's shard of it."""
    if isinstance(tensor, DTensor):
        value = value.to(tensor.device_mesh.device_type)
        value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
    local_shard(tensor).copy_(local_shard(value))


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of `tensor`, detached from autograd."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _versions(tensor: torch.Tensor) -> tuple[int, int]:
    # Operations on a DTensor bump its own version only, those on its local tensor that one's.
    return tensor._version, local_shard(tensor)._version


def on_backward_start(output: Any, call: Callable[[], None]) -> None:
    """Call `call` when backward reaches `output`, or at once if `output` contains no tensor with a gradient."""
    roots = {leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.grad_fn}
    for root in roots:
        root.register_prehook(lambda gradients: call())
    if not roots:
        call()
