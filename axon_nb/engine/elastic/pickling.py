"""How sharded objects travel to a new rank: as plain modules with parameters that have no data yet.

The new rank applies `fully_shard` again, and gets its shards when all ranks do.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY

from axon_nb.engine.elastic import fsdp
from axon_nb.engine.elastic.meshes import is_world_mesh, world_mesh
from axon_nb.engine.live_objects import register
from axon_nb.engine.sharding.sharded import device_mesh_type, is_dtensor, loaded_class

_FSDP = "torch.distributed.fsdp"
_STEP_WRAPPERS = ("step", "_opt_called")
"""What a scheduler sets on its optimizer; it does so again on arrival."""


def reduce(obj: Any, kind: type, old_size: int) -> Any:
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
        plain = kind.__bases__[1] if issubclass(kind, loaded_class(_FSDP, "FSDPModule")) else kind
        return _new, (plain,), _without_fsdp(obj), None, None, nn.Module.__setstate__
    if issubclass(kind, torch.optim.Optimizer):
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
        if str(getattr(getattr(hook, "hook", hook), "__module__", "")).startswith(_FSDP)
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
        (list(state._modules), fsdp.mesh_of(model, state), fsdp.options_of(state))
        for model in models.values()
        for state in fsdp.states_of(model)
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
    fsdp.replace_parameters(replaced)
