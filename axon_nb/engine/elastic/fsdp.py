"""FSDP2 modules in a world of another size: each parameter becomes a shard of the new mesh, under the same modules.

Private hooks into torch's `fully_shard`, `elastic.fsdp2` in the register.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from axon_nb.engine.live_objects import objects_of, with_subclasses
from axon_nb.engine.session import current
from axon_nb.torch_api import torch_api


def states_of(model: nn.Module) -> list[Any]:
    """Return the FSDP2 states in a model, inner ones first: the order in which `fully_shard` creates them."""
    states: dict[int, Any] = {}
    for module in model.modules():
        if callable(get := getattr(module, "_get_fsdp_state", None)):
            state = get()
            states[id(state)] = state
    return list(reversed(states.values()))


def parameters(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, group and record of each parameter that FSDP2 shards."""
    names = {id(module): name for name, module in model.named_modules()}
    for state in states_of(model):
        for group in torch_api().fsdp_parameter_groups(state):
            for record in group.fsdp_params if group is not None else ():
                info = record._module_info
                yield f"{names[id(info.module)]}.{info.param_name}", group, record


def mesh_of(model: nn.Module, state: Any) -> Any:
    """Return the mesh of a state; of one without parameters, that of any other in its model."""
    groups = [group for one in (state, *states_of(model)) for group in torch_api().fsdp_parameter_groups(one) if group]
    return groups[0].mesh_info.mesh


def options_of(state: Any) -> dict[str, Any]:
    """Return the arguments with which `fully_shard` created a state, besides modules and mesh."""
    groups = [group for group in torch_api().fsdp_parameter_groups(state) if group is not None]
    options: dict[str, Any] = {"mp_policy": state._mp_policy}
    if groups:
        options["offload_policy"] = groups[0].offload_policy
    if not state._auto_reshard_after_forward:
        options["reshard_after_forward"] = bool(groups and groups[0].post_forward_mesh_info is not None)
    return options


@torch.no_grad()
def reshard_parameter(group: Any, record: Any, local: torch.Tensor, gradient: torch.Tensor | None) -> tuple[Any, Any]:
    """Make one parameter a shard of the group's mesh, which has other ranks now.

    Args:
        group: Its FSDPParamGroup.
        record: Its FSDPParam.
        local: This rank's part.
        gradient: This rank's part of the gradient; None: there is none.

    Returns:
        The parameter before and now.
    """
    if getattr(group.mesh_info, "shard_mesh_size", 0) != group.mesh_info.mesh.size():
        after_forward = group.post_forward_mesh_info is not None
        group.mesh_info = dataclasses.replace(group.mesh_info)
        group.post_forward_mesh_info = group.mesh_info if after_forward else None
    record.mesh_info, record.post_forward_mesh_info = group.mesh_info, group.post_forward_mesh_info
    before = record.sharded_param
    whole = nn.Parameter(
        torch.empty(record._orig_size, dtype=local.dtype, device="meta"), requires_grad=before.requires_grad
    )
    _describe_shard(record, whole, group)
    now = set_shard(record, local, gradient)
    if record.post_forward_mesh_info is not None:
        record._init_sharded_post_forward_param_metadata(whole)
    return before, now


@torch.no_grad()
def set_shard(record: Any, local: torch.Tensor, gradient: torch.Tensor | None) -> Any:
    """Give one parameter its data.

    Args:
        record: Its FSDPParam, which describes how it is split.
        local: This rank's part.
        gradient: This rank's part of the gradient; None: there is none.

    Returns:
        The parameter now.
    """
    before = record.sharded_param
    dim = record.fsdp_placement.dim
    padded = torch.zeros(record.padded_sharded_param_size, dtype=local.dtype, device=local.device)
    shard = padded.narrow(dim, 0, local.size(dim) if local.numel() else 0)
    shard.copy_(local)
    record._sharded_param_data = padded.view(-1)
    record.sharded_param = nn.Parameter(record.to_sharded_dtensor(shard), requires_grad=before.requires_grad)
    if gradient is not None:
        record.sharded_param.grad = record.to_sharded_dtensor(gradient)
    record._setattr_on_modules(record.sharded_param)
    record.all_gather_outputs = []
    vars(record).pop("_unsharded_param", None)
    return record.sharded_param


def _describe_shard(record: Any, whole: nn.Parameter, group: Any) -> None:
    placement = record.fsdp_placement
    choose: Callable[[Any], Any] | None = (lambda _: placement) if placement.dim else None
    arguments = [whole, group.device, choose]
    if "mesh_info" in inspect.signature(record._init_sharded_param).parameters:  # since torch 2.13
        arguments.append(group.mesh_info)
    record._init_sharded_param(*arguments)


def replace_parameters(replaced: Mapping[int, tuple[Any, Any]]) -> None:
    """Replace parameters in all optimizers and in the variables of cells.

    Args:
        replaced: The parameter before and now, by the `id` of the former.
    """

    def now(value: Any) -> Any:
        return replaced[id(value)][1] if id(value) in replaced else value

    for optimizer in objects_of(set(with_subclasses(torch.optim.Optimizer))):
        for group in getattr(optimizer, "param_groups", ()):
            group["params"][:] = [now(parameter) for parameter in group["params"]]
        state = defaultdict(dict, {now(parameter): value for parameter, value in optimizer.state.items()})
        optimizer.state = state
    namespace = current().kernel.shell.user_ns
    for name, value in list(namespace.items()):
        if id(value) in replaced:
            namespace[name] = now(value)
