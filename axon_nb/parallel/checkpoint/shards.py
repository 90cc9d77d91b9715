"""What a model's tensors are called, and which of them are parts of a larger one without saying so themselves."""

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
    """The model within wrappers, or this rank's part of it, whose names are those of a single process."""
    while isinstance(model, DistributedDataParallel | FSDP | HeldStages | Parallel3D):
        model = model.pipeline if isinstance(model, Parallel3D) else model.module
    return model


class Shards:
    """The parameters of a model by name; parts of `axon_nb.parallel.tensor` layers as DTensors.

    Those layers hold plain tensors, one part a rank under the same name. As a DTensor over the layer's group a part
    says where in the whole it belongs, so that another number of ranks can read it.

    Args:
        model: Without wrappers.
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
                self._dims[clean(f"{prefix}.{name}" if prefix else name)] = (dim, meshes[group])
        self.parts = frozenset(self._dims)
        self.parameters = {clean(name): parameter for name, parameter in model.named_parameters()}

    def wrap(self, name: str, tensor: Any, shape: torch.Size | None = None) -> Any:
        """A tensor of the parameter `name` as a DTensor over the same memory, where it is a part.

        Args:
            name: Of the parameter.
            tensor: The parameter, or a state of the optimizer: one of another shape is no part.
            shape: The part's shape; None: the tensor's own.
        """
        if name not in self._dims or not isinstance(tensor, torch.Tensor) or isinstance(tensor, DTensor):
            return tensor
        if shape is not None and tensor.shape != shape:
            return tensor
        dim, mesh = self._dims[name]
        return DTensor.from_local(tensor.detach(), mesh, [Shard(dim)], run_check=False)

    def whole_shape(self, name: str) -> torch.Size:
        """The shape of the whole parameter."""
        shape: torch.Size = self.wrap(name, self.parameters[name]).shape
        return shape

    def names(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter with its name, each once."""
        yield from self.parameters.items()


def clean(name: str) -> str:
    """A parameter's name without the parts that wrappers add to it."""
    for part in _WRAPPERS:
        name = name.replace(part, "")
    return name
