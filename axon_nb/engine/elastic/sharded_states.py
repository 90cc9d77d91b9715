"""What is sharded over a world that changes its size: meshes, FSDP2 modules, ZeRO-1 optimizers, and their pickled form.

Everything sharded has a key that is the same on all ranks. Meshes of all ranks stay the same objects; each FSDP2
parameter becomes a shard of the new mesh, under the same modules; a ZeRO-1 parameter's states move to the rank that
updates it then. To a new rank, sharded objects travel as plain modules with parameters that have no data yet: it
applies `fully_shard` again, and gets its shards when all ranks do.

Private hooks into torch's `fully_shard` and ZeroRedundancyOptimizer: `elastic.fsdp2`, `elastic.zero` in the register.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from msgspec import Struct
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY

from axon_nb.engine.live_objects import FSDP, live_objects, objects_of, register, with_subclasses
from axon_nb.engine.session import current, user_variables
from axon_nb.engine.sharding import device_mesh_type, is_dtensor, is_sharded, loaded_class
from axon_nb.torch_api import torch_api

Key = tuple[str, str, str]
"""A variable, a parameter in it (its name or its index), and which of its tensors."""
_STEP_WRAPPERS = ("step", "_opt_called")
"""What a scheduler sets on its optimizer; it does so again on arrival."""


def is_world_mesh(mesh: Any, size: int) -> bool:
    """Whether a mesh has one axis with all ranks of a world of `size` ranks."""
    return bool(mesh.ndim == 1 and mesh.mesh.tolist() == list(range(size)))


def world_mesh(device_type: str, names: tuple[str, ...] | None) -> Any:
    """Return a mesh of all ranks on one axis."""
    return device_mesh_type().from_group(dist.group.WORLD, device_type, mesh_dim_names=names)  # type: ignore[attr-defined]


def resize_meshes(old_size: int) -> None:
    """Give every mesh of all `old_size` ranks on one axis the ranks of the world."""
    for mesh in objects_of({device_mesh_type()}):
        if is_world_mesh(mesh, old_size):
            fresh = world_mesh(mesh.device_type, mesh.mesh_dim_names)
            vars(mesh).clear()
            vars(mesh).update(vars(fresh))


def fsdp_states(model: nn.Module) -> list[Any]:
    """Return the FSDP2 states in a model, inner ones first: the order in which `fully_shard` creates them."""
    states: dict[int, Any] = {}
    for module in model.modules():
        if callable(get := getattr(module, "_get_fsdp_state", None)):
            state = get()
            states[id(state)] = state
    return list(reversed(states.values()))


def fsdp_parameters(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, group and record of each parameter that FSDP2 shards."""
    names = {id(module): name for name, module in model.named_modules()}
    for state in fsdp_states(model):
        for group in torch_api().fsdp_parameter_groups(state):
            for record in group.fsdp_params if group is not None else ():
                info = record._module_info
                yield f"{names[id(info.module)]}.{info.param_name}", group, record


def fsdp_mesh(model: nn.Module, state: Any) -> Any:
    """Return the mesh of a state; of one without parameters, that of any other in its model."""
    groups = [
        group for one in (state, *fsdp_states(model)) for group in torch_api().fsdp_parameter_groups(one) if group
    ]
    return groups[0].mesh_info.mesh


def fsdp_options(state: Any) -> dict[str, Any]:
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


def is_zero(value: Any) -> bool:
    """Whether the value is torch's ZeroRedundancyOptimizer."""
    return isinstance(
        value, loaded_class("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer")
    )


def zero_overlaps(optimizer: Any) -> bool:
    """Whether DDP runs its steps, in pieces, during the backward."""
    return bool(optimizer._overlap_with_ddp)


def zero_owners(optimizer: Any, size: int) -> list[int]:
    """Return, for each of its parameters, the rank that updates it in a world of `size` ranks."""
    before = optimizer.world_size
    optimizer._clear_cache()
    optimizer.world_size = size
    try:
        by_parameter = dict(optimizer._param_to_rank)
        return [by_parameter[parameter] for parameter in optimizer._all_params]
    finally:
        optimizer.world_size = before
        optimizer._clear_cache()


def zero_states(optimizer: Any) -> dict[tuple[int, str], Any]:
    """Return the states that this rank holds, by the parameter's index and the state's name."""
    index_of = {id(parameter): index for index, parameter in enumerate(optimizer._all_params)}
    return {
        (index_of[id(parameter)], key): value
        for parameter, state in optimizer.optim.state.items()
        for key, value in state.items()
    }


@torch.no_grad()
def adopt_zero_states(optimizer: Any, held: Mapping[tuple[int, str], Any], *, rank: int, size: int) -> None:
    """Make the optimizer one of `size` ranks, with these states for the parameters that this rank updates.

    Args:
        optimizer: The optimizer.
        held: What `states` returns, for the new world.
        rank: This rank.
        size: Number of ranks.
    """
    optimizer.rank = optimizer.global_rank = rank
    optimizer.world_size = size
    optimizer._clear_cache()
    optimizer._init_local_optimizer()
    for (index, key), value in held.items():
        optimizer.optim.state[optimizer._all_params[index]][key] = value
    optimizer._build_param_buckets()


def step_alone(optimizer: Any, held: Mapping[tuple[int, str], Any]) -> None:
    """Let this rank step all parameters by itself, as the optimizer inside would on one rank.

    Args:
        optimizer: The optimizer; what it holds of the world stays as it is.
        held: What `states` returns, of all ranks.
    """
    alone = copy.copy(optimizer.optim)
    alone.param_groups, alone.state = optimizer.param_groups, defaultdict(dict)
    for (index, key), value in held.items():
        parameter = optimizer._all_params[index]
        is_tensor = isinstance(value, torch.Tensor)
        device = parameter.device if is_tensor and value.ndim else "cpu"
        alone.state[parameter][key] = value.to(device, copy=True) if is_tensor else value
    vars(optimizer)["step"] = alone.step


class Piece(Struct, frozen=True):
    """What all ranks must know about a tensor to send it."""

    shape: tuple[int, ...]
    """Shape of the full tensor."""
    dtype: torch.dtype
    device: str
    """``cpu`` or ``cuda``."""
    dim: int = -1
    """The dimension in which it is split; -1: it is whole, on one rank."""
    owner: int = -1
    """The rank that has it, if it is whole; -1: all of them."""
    value: Any = None
    """The value itself, if it is not a tensor."""


def _variables(kind: Any) -> Iterator[tuple[str, Any]]:
    seen = set()
    for name, value in sorted(user_variables(current().kernel.shell).items()):
        if isinstance(value, kind) and id(value) not in seen:
            seen.add(id(value))
            yield name, value


def outer_modules() -> dict[str, Any]:
    """Return the variables that are modules, without those that another one contains."""
    modules = dict(_variables(torch.nn.Module))
    inner = {id(module) for value in modules.values() for module in value.modules() if module is not value}
    return {name: value for name, value in modules.items() if id(value) not in inner}


def fsdp_models() -> dict[str, Any]:
    """Return the variables that are, or contain, FSDP2 modules; a module inside another one is left out."""
    if not live_objects(FSDP)[0]:
        return {}
    return {name: value for name, value in outer_modules().items() if any(map(is_sharded, value.modules()))}


def sharded_optimizers() -> dict[str, Any]:
    """Return the optimizers of which states, or parameters, are DTensors."""
    return {
        name: value
        for name, value in _variables(torch.optim.Optimizer)
        if not is_zero(value) and any(is_dtensor(parameter) for parameter in parameters_of(value))
    }


def zero_optimizers() -> dict[str, Any]:
    """Return the ZeRO-1 optimizers."""
    return {name: value for name, value in _variables(torch.optim.Optimizer) if is_zero(value)}


def parameters_of(optimizer: Any) -> list[Any]:
    """Return an optimizer's parameters, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def own_pieces() -> dict[Key, tuple[Piece, Any]]:
    """Return what this rank holds of each sharded tensor, or the value itself."""
    pieces: dict[Key, tuple[Piece, Any]] = {}
    for name, model in fsdp_models().items():
        for parameter, _, record in fsdp_parameters(model):
            pieces[name, parameter, "parameter"] = _piece(record.sharded_param)
            if record.sharded_param.grad is not None:
                pieces[name, parameter, "gradient"] = _piece(record.sharded_param.grad)
    for name, optimizer in sharded_optimizers().items():
        for index, parameter in enumerate(parameters_of(optimizer)):
            for key, value in optimizer.state.get(parameter, {}).items():
                pieces[name, str(index), key] = _piece(value)
    rank = current().config.rank
    for name, optimizer in zero_optimizers().items():
        for (index, key), value in zero_states(optimizer).items():
            pieces[name, str(index), key] = _piece(value, owner=rank)
    return pieces


def _piece(value: Any, *, owner: int = -1) -> tuple[Piece, Any]:
    if not isinstance(value, torch.Tensor):
        return Piece((), torch.float32, "cpu", owner=owner, value=value), None
    local = value.detach()
    dim = -1
    if is_dtensor(value):
        local = value.to_local().detach()  # type: ignore[attr-defined]
        (placement,) = value.placements  # type: ignore[attr-defined]
        dim = placement.dim if placement.is_shard() else -1
    return Piece(tuple(value.shape), value.dtype, local.device.type, dim, owner), local


def reduce_sharded(obj: Any, kind: type, old_size: int) -> Any:
    """Return how to recreate a sharded object on a new rank; None if the object is not one.

    Args:
        obj: The object.
        kind: Its type.
        old_size: Number of ranks of the meshes that become those of the new world.
    """
    if is_dtensor(obj):
        return placeholder, (tuple(obj.shape), obj.dtype, obj.requires_grad, isinstance(obj, nn.Parameter))
    if issubclass(kind, device_mesh_type()) and is_world_mesh(obj, old_size):
        return world_mesh, (obj.device_type, obj.mesh_dim_names)
    if issubclass(kind, nn.Module) and getattr(obj, "_is_fsdp_managed_module", False):
        plain = kind.__bases__[1] if issubclass(kind, loaded_class(*FSDP)) else kind
        return _new, (plain,), _without_fsdp(obj), None, None, nn.Module.__setstate__
    if issubclass(kind, torch.optim.Optimizer) and kind.__getstate__ is torch.optim.Optimizer.__getstate__:
        state = {name: value for name, value in vars(obj).items() if name not in _STEP_WRAPPERS}
        return _new, (kind,), state, None, None, _set_optimizer
    if kind is weakref.ref:
        return (weakref.ref, (obj(),)) if obj() is not None else (_dead_reference, ())
    return None


def _dead_reference() -> Any:
    return lambda: None


def _new(kind: Any) -> Any:
    return kind.__new__(kind)


def placeholder(shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool, is_parameter: bool) -> torch.Tensor:
    """Return a tensor without data, for a parameter that `fully_shard` will split."""
    tensor = torch.empty(shape, dtype=dtype, device="meta")
    return nn.Parameter(tensor, requires_grad=requires_grad) if is_parameter else tensor


def _set_optimizer(optimizer: Any, state: dict[str, Any]) -> None:
    vars(optimizer).update(state)
    optimizer._patch_step_function()
    register(optimizer)


def _without_fsdp(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes without what `fully_shard` has added."""
    state = {name: value for name, value in vars(module).items() if name not in (STATE_KEY, REGISTRY_KEY)}
    dropped = {
        number
        for name, hooks in state.items()
        if name.endswith("_hooks") and isinstance(hooks, dict)
        for number, hook in hooks.items()
        if str(getattr(getattr(hook, "hook", hook), "__module__", "")).startswith(FSDP[0])
    }
    for name, hooks in state.items():
        if "_hooks" in name and isinstance(hooks, dict):
            state[name] = type(hooks)((number, hook) for number, hook in hooks.items() if number not in dropped)
    for name in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
        state.pop(name, None)
    return state


def fsdp_calls(models: Mapping[str, nn.Module]) -> list[tuple[Sequence[nn.Module], Any, dict[str, Any]]]:
    """Return the calls of `fully_shard` that have sharded these models, in their order: modules, mesh and options."""
    return [
        (list(state._modules), fsdp_mesh(model, state), fsdp_options(state))
        for model in models.values()
        for state in fsdp_states(model)
    ]


def apply_fsdp(calls: Sequence[tuple[Sequence[nn.Module], Any, dict[str, Any]]]) -> None:
    """Make these calls on a new rank, and use the new parameters in its optimizers and variables."""
    if not calls:
        return
    from torch.distributed.fsdp import fully_shard

    replaced: dict[int, tuple[Any, Any]] = {}
    for modules, mesh, options in calls:
        places = [
            (module, name, parameter)
            for root in modules
            for module in root.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        fully_shard(modules[0] if len(modules) == 1 else list(modules), mesh=mesh, **options)
        now = [(before, module._parameters[name]) for module, name, before in places]
        replaced |= {id(before): (before, after) for before, after in now if after is not before}
    replace_parameters(replaced)
