"""Captures a model's classes and shapes without its values, as it was before wrapping.

Modules are pickled attribute by attribute, with what wrappers added left out: FSDP2's classes, states and hooks,
compiled forms; DTensors get their global shape. The state of `fully_shard` is found by the attribute name that torch's
`contract` uses.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import checkpoint

from axon_nb.comm.group import ProcessGroup
from axon_nb.comm.world import World
from axon_nb.plan.errors import CaptureError
from axon_nb.plan.models import CapturedModel
from axon_nb.torch_api import torch_api

_HOOKS = (
    ("_forward_pre_hooks", ("_forward_pre_hooks_with_kwargs",)),
    ("_forward_hooks", ("_forward_hooks_with_kwargs", "_forward_hooks_always_called")),
    ("_backward_pre_hooks", ()),
    ("_backward_hooks", ()),
    ("_state_dict_pre_hooks", ()),
    ("_state_dict_hooks", ()),
    ("_load_state_dict_pre_hooks", ()),
    ("_load_state_dict_post_hooks", ()),
)
"""A module's hook dicts, and the dicts that share their ids."""
_DROPPED = frozenset(
    {
        "_compiled_call_impl",
        "_flat_weight_refs",  # of RNNs, which recreate it
        "_is_fsdp_managed_module",  # with one of these three, torch refuses to shard the module again
        "_fsdp_use_orig_params",
        "_distribute_module_applied",
    }
)
_STATES = "__composable_api_state_key"
"""Prefix of the attributes in which torch keeps the state of `fully_shard` (2.11 to 2.13)."""
_WRAPPER_PACKAGES = ("torch.distributed.", "torch.nn.parallel.", "axon_nb.")
"""Packages whose hooks on a user's module belong to wrappers."""
_CANNOT_CAPTURE = {
    "Pipeline": "holds only its own rank's stages",
    "Parallel3D": "holds only its own rank's stages",
    "FullyShardedDataParallel": "(torch's FSDP1) has flattened its parameters",
}
_DATA_PARALLEL = (
    ("torch.nn.parallel.", "DataParallel"),
    ("torch.nn.parallel.", "DistributedDataParallel"),
    ("axon_nb.parallel.", "ShardedModel"),
)
"""Wrappers with the model in `module`, by package and class; by name, because most processes import few of them."""
_COMPILED = ("torch._dynamo.", "OptimizedModule")
_FSDP2 = ("torch.distributed.", "FSDPModule")
_RECOMPUTED = ("torch.distributed.", "CheckpointWrapper")
_SHARDED_LAYERS = "axon_nb.parallel.tensor."


def capture(model: nn.Module, name: str = "model", *, bare: bool = False) -> CapturedModel:
    """Capture what a plan needs of a model: classes, shapes and dtypes. No values are read, copied or sent.

    The capture undoes what DDP, `axon_nb.parallel.FSDP`, `fully_shard`, `parallelize` and `torch.compile` did to the
    model.

        captured = plan.capture(model)      # on a rank, before or after wrapping
        plan.memory(captured, 64, inputs=plan.TensorSpec(("batch", 1024)))

    Args:
        model: A rank's model that has all layers.
        name: Its name in displays.
        bare: Whether to leave out activation checkpointing and your own hooks, too.

    Raises:
        PlanError: it is not a module, is only a part of a model, or cannot be pickled.
    """
    _check_wrapper(model)
    inner = inner_model(model)
    if not isinstance(inner, nn.Module):
        raise CaptureError(f"{name} must be a torch.nn.Module; it has type {type(inner).__name__}.")
    modules = list(inner.modules())
    for module in modules:
        _check_wrapper(module)
        _check_layer(module)
    file = io.BytesIO()
    try:
        _Skeleton(file, torch_api().fsdp_unsharded(modules), bare=bare).dump(inner)
    except CaptureError:
        raise
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        raise CaptureError(
            f"{name}, a {type(inner).__name__}, cannot be captured ({type(error).__name__}: {first}): give a function "
            "without arguments that makes the model."
        ) from error
    return CapturedModel(name, cloudpickle.dumps(partial(pickle.loads, file.getvalue())))


def capture_or_reason(look: Callable[[], Any], name: str) -> CapturedModel | str:
    """Capture a model by name on a rank.

    Args:
        look: Returns the object of that name.
        name: Its name.

    Returns:
        The captured model, or one sentence that says why there is none.
    """
    try:
        value = look()
    except (NameError, AttributeError, LookupError, TypeError) as error:
        return f"{name!r} does not exist ({error})"
    try:
        return capture(value, name)
    except CaptureError as error:
        return str(error)


def inner_model(model: Any) -> Any:
    """Return the model inside DDP, FSDP and torch.compile wrappers."""
    while True:
        if _is_a(type(model), *_DATA_PARALLEL):
            model = model.module
        elif _is_a(type(model), _COMPILED):
            model = model._orig_mod
        else:
            return model


def is_recomputed(module: nn.Module) -> bool:
    """Whether the module uses activation checkpointing."""
    forward = vars(module).get("forward")
    is_patched = isinstance(forward, partial) and forward.func is checkpoint
    return is_patched or _is_a(type(module), _RECOMPUTED)


def plain_class(module: Any) -> type[nn.Module]:
    """Return the user's class of a module that was sharded, or wrapped for activation checkpointing."""
    if _is_a(type(module), _RECOMPUTED):
        return plain_class(module._checkpoint_wrapped_module)
    return _own_class(type(module))


def _own_class(kind: type) -> type[nn.Module]:
    """Return a module's own class; `fully_shard` puts a subclass of torch's before it."""
    return next(base for base in kind.__mro__ if not _is_a(base, _FSDP2))


def _is_a(kind: type, *classes: tuple[str, str]) -> bool:
    return any(
        base.__name__ == name and base.__module__.startswith(package)
        for base in kind.__mro__
        for package, name in classes
    )


def _check_wrapper(model: Any) -> None:
    """Raise if a model is of a class that holds only one rank's part of it."""
    for kind in type(model).__mro__:
        why = _CANNOT_CAPTURE.get(kind.__name__)
        if why is not None and kind.__module__.startswith(_WRAPPER_PACKAGES):
            raise CaptureError(f"A {kind.__name__} {why}: call plan.capture(model) before wrapping it.")


def _check_layer(module: Any) -> None:
    """Raise if a layer of axon_nb.parallel holds one rank's part of its parameters."""
    group = getattr(module, "group", None) if type(module).__module__.startswith(_SHARDED_LAYERS) else None
    if group is not None and group.size() > 1:
        raise CaptureError(
            f"The model's layers were sharded by hand ({type(module).__name__}), so the full model is unknown: "
            "give a function without arguments that makes it unsharded."
        )


class _Skeleton(cloudpickle.Pickler):
    """Pickles tensors as their metadata, and modules as they were before wrapping.

    Args:
        file: Output.
        unsharded: DTensors of parameters that are unsharded now, by `id`; those may have another dtype.
        bare: The same as for `capture`.
    """

    def __init__(self, file: io.BytesIO, unsharded: Mapping[int, Any], *, bare: bool) -> None:
        super().__init__(file)
        self._unsharded = unsharded
        self._bare = bare

    def reducer_override(self, obj: Any) -> Any:
        """Return how to rebuild a tensor or a module; anything else as cloudpickle does."""
        if isinstance(obj, torch.Tensor):
            return _empty_tensor, _metadata(self._unsharded.get(id(obj), obj), isinstance(obj, nn.Parameter))
        if isinstance(obj, nn.Module):
            if _is_a(type(obj), _COMPILED):
                return _identity, (obj._orig_mod,)
            if self._bare and _is_a(type(obj), _RECOMPUTED):
                return _identity, (obj._checkpoint_wrapped_module,)
            if type(obj).__reduce_ex__ is object.__reduce_ex__:
                return _new_module, (_own_class(type(obj)),), _own_state(obj, bare=self._bare)
        if isinstance(obj, dist.ProcessGroup | ProcessGroup | World | DeviceMesh):
            raise CaptureError(
                f"The model holds a {type(obj).__name__}, which does not exist in another process: give a function "
                "without arguments that makes the model."
            )
        return super().reducer_override(obj)


def _metadata(tensor: torch.Tensor, is_parameter: bool) -> tuple[Any, ...]:
    """Shape, dtype, requires_grad and whether it is a parameter; of a DTensor, the full tensor's."""
    if is_lazy(tensor):
        raise CaptureError("The model has uninitialized lazy parameters: run it once on a sample, then capture it.")
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad, is_parameter


def _empty_tensor(shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool, is_parameter: bool) -> torch.Tensor:
    made = torch.empty(shape, dtype=dtype)
    if is_parameter:
        return nn.Parameter(made, requires_grad=requires_grad)
    return made.requires_grad_(requires_grad)


def _identity(module: nn.Module) -> nn.Module:
    return module


def _new_module(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)


def _own_state(module: Any, *, bare: bool) -> dict[str, Any]:
    """Return a module's attributes without those of wrappers."""
    # torch's own methods would change RNNs that are in use, and refuse parametrized modules.
    has_own = not type(module).__getstate__.__module__.startswith("torch.")
    everything = dict(module.__getstate__()) if has_own else vars(module)
    state = {
        key: value
        for key, value in everything.items()
        if key not in _DROPPED
        and not key.startswith(_STATES)
        and not (bare and key == "forward" and is_recomputed(module))
    }
    for name, companions in _HOOKS:
        hooks = state.get(name)
        if not hooks:
            continue
        kept = {number: hook for number, hook in hooks.items() if not (bare or _of_wrapper(hook))}
        state[name] = type(hooks)(kept)
        for companion in companions:
            numbers = state.get(companion, {})
            state[companion] = type(numbers)({number: value for number, value in numbers.items() if number in kept})
    return state


def _of_wrapper(hook: Any) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    owner = getattr(hook, "__module__", None) or type(hook).__module__
    return str(owner).startswith(_WRAPPER_PACKAGES)
