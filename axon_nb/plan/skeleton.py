"""Captures a model's classes and shapes without its values, as it was before wrapping."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import cloudpickle
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from axon_nb.plan.errors import PlanError
from axon_nb.plan.models import CapturedModel

__all__ = ["capture", "capture_or_reason"]

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
_SHARDING_MARKS = frozenset({"_is_fsdp_managed_module", "_fsdp_use_orig_params", "_distribute_module_applied"})
"""Attributes that torch sets on modules it has sharded (2.13); with them it refuses to shard again."""
_STATES = "__composable_api_state_key"
"""Prefix of the attributes in which torch keeps the state of `fully_shard` (2.11 to 2.13)."""
_WRAPPER_PACKAGES = ("torch.distributed.", "torch.nn.parallel.", "axon_nb.")
"""Packages whose hooks on a user's module belong to wrappers."""
_CANNOT_CAPTURE = {
    "Pipeline": "holds only its own rank's stages",
    "Parallel3D": "holds only its own rank's stages",
    "FullyShardedDataParallel": "(torch's FSDP1) has flattened its parameters",
}


def capture(model: nn.Module, name: str = "model") -> CapturedModel:
    """Capture what a plan needs of a model: classes, shapes and dtypes. No values are read, copied or sent.

    The capture undoes what DDP, `axon_nb.parallel.FSDP`, `fully_shard` and `parallelize` did to the model.

        captured = plan.capture(model)      # on a rank, before or after wrapping
        plan.memory(captured, 64, inputs=plan.TensorSpec(("batch", 1024)))

    Args:
        model: A rank's model that has all layers.
        name: Its name in displays.

    Raises:
        PlanError: it is not a module, is only a part of a model, or cannot be pickled.
    """
    found = _unwrapped(model)
    if not isinstance(found, nn.Module):
        raise PlanError(f"{name} must be a torch.nn.Module; it has type {type(found).__name__}.")
    file = io.BytesIO()
    try:
        _Skeleton(file).dump(found)
    except PlanError:
        raise
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        raise PlanError(
            f"{name}, a {type(found).__name__}, cannot be captured ({type(error).__name__}: {first}): give a function "
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
    except PlanError as error:
        return str(error)


def _unwrapped(model: Any) -> Any:
    """Return the model inside its wrappers.

    Raises:
        PlanError: there is only one rank's part of it.
    """
    for kind in type(model).__mro__:
        why = _CANNOT_CAPTURE.get(kind.__name__)
        if why is not None and kind.__module__.startswith(_WRAPPER_PACKAGES):
            raise PlanError(f"A {kind.__name__} {why}: call plan.capture(model) before wrapping it.")
    inner = getattr(model, "_orig_mod", None)  # of torch.compile
    if inner is None and type(model).__module__.startswith(_WRAPPER_PACKAGES):
        inner = getattr(model, "module", None)
    return _unwrapped(inner) if isinstance(inner, nn.Module) else model


class _Skeleton(cloudpickle.Pickler):
    """Pickles tensors as their metadata, and modules as they were before wrapping."""

    def reducer_override(self, obj: Any) -> Any:
        """Return how to rebuild a tensor or a module; anything else as cloudpickle does."""
        if isinstance(obj, torch.Tensor):
            return _empty_tensor, _metadata(obj)
        if isinstance(obj, nn.Module) and type(obj).__reduce_ex__ is object.__reduce_ex__:
            return _new_module, (_own_class(type(obj)),), _own_state(obj)
        return super().reducer_override(obj)


def _metadata(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Shape, dtype, requires_grad and whether it is a parameter; of a DTensor, the full tensor's."""
    if is_lazy(tensor):
        raise PlanError("The model has uninitialized lazy parameters: run it once on a sample, then capture it.")
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad, isinstance(tensor, nn.Parameter)


def _empty_tensor(shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool, is_parameter: bool) -> torch.Tensor:
    made = torch.empty(shape, dtype=dtype)
    if is_parameter:
        return nn.Parameter(made, requires_grad=requires_grad)
    return made.requires_grad_(requires_grad)


def _new_module(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)


def _own_class(kind: type) -> type:
    """Return a module's own class; `fully_shard` gives it a subclass of torch's."""
    return next(base for base in kind.__mro__ if not base.__module__.startswith("torch.distributed."))


def _own_state(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes without those of wrappers."""
    state = {
        key: value
        for key, value in dict(module.__getstate__()).items()
        if key not in _SHARDING_MARKS and not key.startswith(_STATES)
    }
    for name, companions in _HOOKS:
        hooks = state.get(name)
        if not hooks:
            continue
        kept = {number: hook for number, hook in hooks.items() if not _of_wrapper(hook)}
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
