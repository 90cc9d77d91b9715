"""A model's classes and sizes without its values, as it was before it was wrapped."""

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
"""Where a module keeps its hooks, and what else it keeps by their numbers."""
_MARKS = frozenset({"_is_fsdp_managed_module", "_fsdp_use_orig_params", "_distribute_module_applied"})
"""Attributes that torch gives to modules which it has sharded (2.13); with them it would not do so again."""
_STATES = "__composable_api_state_key"
"""How the names of attributes begin where torch keeps what `fully_shard` knows of a module (2.11 to 2.13)."""
_WRAPPING = ("torch.distributed.", "torch.nn.parallel.", "axon_nb.")
"""Modules whose hooks on a user's module belong to what has been wrapped around it."""
_OF_RANKS = {
    "Pipeline": "holds the stages of its own rank alone",
    "Parallel3D": "holds the stages of its own rank alone",
    "FullyShardedDataParallel": "of torch (FSDP1) has flattened its parameters",
}


def capture(model: nn.Module, name: str = "model") -> CapturedModel:
    """What a plan needs of a model: classes, shapes and dtypes; no values are read, copied or sent.

    What DDP, `axon_nb.parallel.FSDP`, `fully_shard` and `parallelize` have made of it is undone in what is captured.

        captured = plan.capture(model)      # on a rank, before or after it is wrapped
        plan.memory(captured, 64, inputs=plan.TensorSpec(("batch", 1024)))

    Args:
        model: Of any rank that has all of its layers.
        name: What it is called in displays.

    Raises:
        PlanError: it is no module, a part of a model, or holds what cannot be sent.
    """
    found = _unwrapped(model)
    if not isinstance(found, nn.Module):
        raise PlanError(f"{name} is a {type(found).__name__}: a model is a torch.nn.Module.")
    file = io.BytesIO()
    try:
        _Skeleton(file).dump(found)
    except PlanError:
        raise
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        raise PlanError(
            f"{name}, a {type(found).__name__}, cannot be captured ({type(error).__name__}: {first}): give a function "
            "without arguments that makes such a model."
        ) from error
    return CapturedModel(name, cloudpickle.dumps(partial(pickle.loads, file.getvalue())))


def capture_or_reason(look: Callable[[], Any], name: str) -> CapturedModel | str:
    """What a rank answers when it is asked for a model by name.

    Args:
        look: Gives what has that name here.
        name: It.

    Returns:
        The model, or one sentence about what is in the way.
    """
    try:
        value = look()
    except (NameError, AttributeError, LookupError, TypeError) as error:
        return f"there is no {name!r} ({error})"
    try:
        return capture(value, name)
    except PlanError as error:
        return str(error)


def _unwrapped(model: Any) -> Any:
    """The model within what was wrapped around it.

    Raises:
        PlanError: a rank's part is all that there is.
    """
    for kind in type(model).__mro__:
        why = _OF_RANKS.get(kind.__name__)
        if why is not None and kind.__module__.startswith(_WRAPPING):
            raise PlanError(f"a {kind.__name__} {why}: capture the model before it is wrapped, plan.capture(model).")
    inner = getattr(model, "_orig_mod", None)  # of torch.compile
    if inner is None and type(model).__module__.startswith(_WRAPPING):
        inner = getattr(model, "module", None)
    return _unwrapped(inner) if isinstance(inner, nn.Module) else model


class _Skeleton(cloudpickle.Pickler):
    """Pickles tensors as what makes empty ones, and modules as they were before they were wrapped."""

    def reducer_override(self, obj: Any) -> Any:
        """How an object is made again; as cloudpickle says, for all but tensors and modules."""
        if isinstance(obj, torch.Tensor):
            return _empty, _described(obj)
        if isinstance(obj, nn.Module) and type(obj).__reduce_ex__ is object.__reduce_ex__:
            return _made, (_own_class(type(obj)),), _own_state(obj)
        return super().reducer_override(obj)


def _described(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Shape, dtype, whether it is trained, whether it is a parameter; of a distributed tensor the whole."""
    if is_lazy(tensor):
        raise PlanError("the model has parameters without a shape yet: run it once on a sample, then capture it.")
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad, isinstance(tensor, nn.Parameter)


def _empty(shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool, is_parameter: bool) -> torch.Tensor:
    made = torch.empty(shape, dtype=dtype)
    if is_parameter:
        return nn.Parameter(made, requires_grad=requires_grad)
    return made.requires_grad_(requires_grad)


def _made(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)


def _own_class(kind: type) -> type:
    """`fully_shard` gives a module a class of torch's, derived from its own."""
    return next(base for base in kind.__mro__ if not base.__module__.startswith("torch.distributed."))


def _own_state(module: nn.Module) -> dict[str, Any]:
    """A module's attributes, without what wrappers have put there."""
    state = {
        key: value
        for key, value in dict(module.__getstate__()).items()
        if key not in _MARKS and not key.startswith(_STATES)
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
    return str(owner).startswith(_WRAPPING)
