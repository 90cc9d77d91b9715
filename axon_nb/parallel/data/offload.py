"""Offload FSDP's parameters, or an optimizer's states, to host memory between uses.

Only the local tensor of a DTensor is moved. The DTensor itself stays, so modules, optimizers and checkpoints keep their
references. CPU ranks make the same moves, from memory to memory.

While the local tensor is on the host, views of the DTensor (`detach`, `view`) raise: torch gives them its storage,
which is on the GPU. `state_dict` makes such views, so it gets copies on the GPU; `to_local` and `full_tensor` do not.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from axon_nb.errors import UsageError
from axon_nb.parallel.optimizer_kind import local_optimizer, optimizer_states
from axon_nb.records.hooks import missing_hooks

_HOST = torch.device("cpu")


class ParameterOffloader:
    """Keeps FSDP's parameter shards in host memory, except during optimizer steps; gradients stay on the device.

    FSDP2 fills its all-gather buffers from `_sharded_param_data`, which may be on any device. With it on the host, each
    all-gather copies only its unit's parameters to the device.

    Args:
        model: A model processed by `fully_shard`.
        device: Its compute device.

    Raises:
        UsageError: parameters have no data yet, or this torch lacks the hooks.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._parts = _fsdp_parameters(model)
        if absent := sorted({name for part in self._parts for name in missing_hooks("parallel.offload", part=part)}):
            raise UsageError(
                f"CPUOffload.PARAMS needs {', '.join(absent)}, which torch {torch.__version__} lacks; use "
                "CPUOffload.FULL, which also offloads gradients and optimizer states."
            )
        for part in self._parts:
            if part._sharded_param_data.is_meta:
                raise UsageError("CPUOffload.PARAMS: the parameters have no data; call model.to_empty(device=…) first.")
            part._sharded_param_data = _copy(part._sharded_param_data, _HOST)
            part.sharded_param._local_tensor = self._host_shard(part)
        held = {part.sharded_param: part for part in self._parts}
        for module in model.modules():
            if parts := [held[one] for one in module.parameters(recurse=False) if one in held]:
                module.register_state_dict_pre_hook(functools.partial(self._fetch_parts, parts))
                module.register_state_dict_post_hook(functools.partial(self._return_parts, parts))

    def attach(self, optimizer: Optimizer) -> None:
        """Copy the parameters to the device for the steps of `optimizer`."""
        optimizer.register_step_pre_hook(self._fetch)
        optimizer.register_step_post_hook(self._store)

    def _host_shard(self, part: Any) -> torch.Tensor:
        whole: torch.Tensor = part._sharded_param_data.view(part.padded_sharded_param_size)
        return whole.narrow(0, 0, part.sharded_size[0])

    @torch.no_grad()
    def _fetch_parts(self, parts: list[Any], *_: Any) -> None:
        for part in parts:
            part.sharded_param._local_tensor = _copy(self._host_shard(part), self._device)

    def _return_parts(self, parts: list[Any], *_: Any) -> None:
        for part in parts:
            part.sharded_param._local_tensor = self._host_shard(part)

    def _fetch(self, *_: Any) -> None:
        self._fetch_parts(self._parts)

    @torch.no_grad()
    def _store(self, *_: Any) -> None:
        for part in self._parts:
            host_shard = self._host_shard(part)
            host_shard.copy_(part.sharded_param._local_tensor)
            part.sharded_param._local_tensor = host_shard


def offload_states(optimizer: Optimizer, device: torch.device) -> None:
    """Keep the states of an optimizer in host memory, except during its steps.

    Args:
        optimizer: Any optimizer whose states are tensors.
        device: The device of its parameters.
    """

    def fetch(*_: Any) -> None:
        _move_states(optimizer, device)

    def store(*_: Any) -> None:
        _move_states(optimizer, _HOST)

    # ZeroRedundancyOptimizer has no states itself; its local optimizer does.
    inner = local_optimizer(optimizer)
    inner.register_step_pre_hook(fetch)
    inner.register_step_post_hook(store)


def _fsdp_parameters(model: nn.Module) -> list[Any]:
    parameters = []
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            state: Any = unit._get_fsdp_state()
            # Up to torch 2.11: one group per module.
            groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
            parameters += [part for group in groups if group is not None for part in group.fsdp_params]
    return parameters


@torch.no_grad()
def _move_states(optimizer: Optimizer, device: torch.device) -> None:
    for state in optimizer_states(optimizer):
        if isinstance(state, DTensor):
            state._local_tensor = _copy(state._local_tensor, device)
        else:
            state.data = _copy(state, device)


def _copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    # Pinned: the GPU accesses it directly, at about twice the speed.
    pinned = device.type == "cpu" and tensor.is_cuda
    return torch.empty_like(tensor, device=device, pin_memory=pinned).copy_(tensor)
