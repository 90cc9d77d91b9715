"""Keeping FSDP's parameters, or an optimizer's states, in the host's memory between uses.

What is moved is what a DTensor holds on this rank: the DTensor stays, so that modules, optimizers and checkpoints go on
holding it, and it can be read at any time. On CPU ranks the same moves are made, from memory to memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from axon_nb.comm.errors import CommError
from axon_nb.parallel.optimizer_state import held_states, own_optimizer

__all__ = ["HostParameters", "keep_states_on_host", "missing"]

_HOST = torch.device("cpu")
_HOOKS = ("_sharded_param_data", "padded_sharded_param_size", "sharded_param", "sharded_size")


class HostParameters:
    """FSDP's parts of parameters, on the host but for the steps of optimizers; gradients stay on the device.

    FSDP2 fills the buffers of its all-gathers from `_sharded_param_data`, which may be anywhere: with that on the host,
    each all-gather copies its unit's parameters to the device, and nothing else is there.

    Args:
        model: Made by `fully_shard`.
        device: Where it computes.

    Raises:
        CommError: parameters have no data yet; this torch has not the hooks.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._parts = _fsdp_parameters(model)
        if lost := missing(self._parts):
            raise CommError(
                f"PARAMS needs {', '.join(lost)}, which torch {torch.__version__} does not have: take FULL, which "
                "offloads gradients and optimizer states as well."
            )
        for part in self._parts:
            if part._sharded_param_data.is_meta:
                raise CommError("PARAMS: the parameters have no data yet: model.to_empty(device=…) comes before FSDP.")
            part._sharded_param_data = _copy(part._sharded_param_data, _HOST)
            part.sharded_param._local_tensor = self._home(part)

    def follow(self, optimizer: Optimizer) -> None:
        """Bring the parameters to the device for its steps."""
        optimizer.register_step_pre_hook(self._fetch)
        optimizer.register_step_post_hook(self._store)

    def _home(self, part: Any) -> torch.Tensor:
        whole: torch.Tensor = part._sharded_param_data.view(part.padded_sharded_param_size)
        return whole.narrow(0, 0, part.sharded_size[0])

    @torch.no_grad()
    def _fetch(self, *_: Any) -> None:
        for part in self._parts:
            part.sharded_param._local_tensor = _copy(self._home(part), self._device)

    @torch.no_grad()
    def _store(self, *_: Any) -> None:
        for part in self._parts:
            home = self._home(part)
            home.copy_(part.sharded_param._local_tensor)
            part.sharded_param._local_tensor = home


def keep_states_on_host(optimizer: Optimizer, device: torch.device) -> None:
    """Have the states of an optimizer on the host, but for its steps.

    Args:
        optimizer: Any whose states are tensors.
        device: Where its parameters are.
    """

    def fetch(*_: Any) -> None:
        _move(optimizer, device)

    def store(*_: Any) -> None:
        _move(optimizer, _HOST)

    # That of this rank's part, where there are several: the other has no states.
    own = own_optimizer(optimizer)
    own.register_step_pre_hook(fetch)
    own.register_step_post_hook(store)


def missing(parts: list[Any]) -> list[str]:
    """Names of the private hooks that this torch does not have."""
    lost = {f"FSDPParam.{name}" for part in parts for name in _HOOKS if not hasattr(part, name)}
    return sorted(lost | ({"DTensor._local_tensor"} if not hasattr(DTensor, "_local_tensor") else set()))


def _fsdp_parameters(model: nn.Module) -> list[Any]:
    found = []
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            state: Any = unit._get_fsdp_state()
            # One group a module up to torch 2.11.
            groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
            found += [part for group in groups if group is not None for part in group.fsdp_params]
    return found


@torch.no_grad()
def _move(optimizer: Optimizer, device: torch.device) -> None:
    for state in held_states(optimizer):
        if isinstance(state, DTensor):
            state._local_tensor = _copy(state._local_tensor, device)
        else:
            state.data = _copy(state, device)


def _copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    # Pinned: the card reads and writes it by itself, at about twice the speed.
    pinned = device.type == "cpu" and tensor.is_cuda
    return torch.empty_like(tensor, device=device, pin_memory=pinned).copy_(tensor)
