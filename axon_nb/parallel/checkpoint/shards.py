"""Names of a model's parameters, and which of them are shards without being DTensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from axon_nb.parallel.fsdp import FSDP
from axon_nb.parallel.pipeline.held import HeldStages
from axon_nb.parallel.three_d import Parallel3D

__all__ = ["Shards", "plain_model"]

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def plain_model(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers, or this rank's part of it, with the names of a single process."""
    while isinstance(model, DistributedDataParallel | FSDP | HeldStages | Parallel3D):
        model = model.pipeline if isinstance(model, Parallel3D) else model.module
    return model


class Shards:
    """The parameters of a model by name; shards of `axon_nb.parallel.tensor` layers become DTensors.

    These layers hold plain tensors, with one shard per rank under the same name. As a DTensor over the layer's group, a
    shard carries its position in the full tensor, so that another number of ranks can read it.

    Args:
        model: The model without wrappers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._dims: dict[str, tuple[int, DeviceMesh]] = {}
        meshes: dict[Any, DeviceMesh] = {}
        for prefix, module in model.named_modules():
            dims: dict[str, int] = getattr(module, "shard_dims", {})
            if not dims or module.group.size() == 1:
                continue
            group = module.group.torch_group
            for name, dim in dims.items():
                if group not in meshes:
                    kind = next(module.parameters()).device.type
                    meshes[group] = DeviceMesh.from_group(group, kind)
                self._dims[strip_wrapper_names(f"{prefix}.{name}" if prefix else name)] = (dim, meshes[group])
        self.sharded_names = frozenset(self._dims)
        self.parameters = {strip_wrapper_names(name): parameter for name, parameter in model.named_parameters()}

    def as_dtensor(self, name: str, tensor: Any, shape: torch.Size | None = None) -> Any:
        """Return a tensor of the parameter `name`, as a DTensor over the same memory if it is a shard.

        Args:
            name: Name of the parameter.
            tensor: The parameter, or an optimizer state; a state of another shape is not a shard.
            shape: Shape of the shard; None: that of the tensor.
        """
        if name not in self._dims or not isinstance(tensor, torch.Tensor) or isinstance(tensor, DTensor):
            return tensor
        if shape is not None and tensor.shape != shape:
            return tensor
        dim, mesh = self._dims[name]
        return DTensor.from_local(tensor.detach(), mesh, [Shard(dim)], run_check=False)

    def full_shape(self, name: str) -> torch.Size:
        """Return the shape of the full parameter."""
        shape: torch.Size = self.as_dtensor(name, self.parameters[name]).shape
        return shape

    def names(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield every parameter once, with its name."""
        yield from self.parameters.items()


def strip_wrapper_names(name: str) -> str:
    """Return a parameter's name without the prefixes that wrappers add."""
    for part in _WRAPPERS:
        name = name.replace(part, "")
    return name
