"""Pickles a model's structure without its data, as it was before wrapping, so that a planner can rebuild it.

Modules are pickled attribute by attribute, so no user code runs. What wrappers added is left out: FSDP2's classes and
states, hooks, checkpointed forwards; DTensors get their global shape. The state of `fully_shard` is found by the
attribute name that torch's `contract` uses. On a torch that names it otherwise the model cannot be sent, and a sentence
says so.
"""

from __future__ import annotations

import functools
import io
import pickle
import weakref
from collections.abc import Mapping
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from axon_nb.comm.group import ProcessGroup
from axon_nb.comm.world import World
from axon_nb.engine.sharding.placement import layer_shardings, unsharded_parameters
from axon_nb.engine.sharding.sharded import device_mesh_type, is_stage, loaded_class
from axon_nb.errors import UsageError

__all__ = ["SkeletonError", "inner_model", "is_recomputed", "plain_class", "skeleton"]

_STATE_KEY = "__composable_api_state_key"
_MODEL_ATTRIBUTES = ("training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
"""Those of `nn.Module`'s own attributes that belong to the model; the others hold hooks."""
_DROPPED = ("_compiled_call_impl", "_flat_weight_refs")
_FSDP1 = ("torch.distributed.fsdp", "FullyShardedDataParallel")
_FSDP2 = ("torch.distributed.fsdp", "FSDPModule")
_SHARDED = ("axon_nb.parallel.data.sharded_model", "ShardedModel")
_COMPILED = ("torch._dynamo.eval_frame", "OptimizedModule")
_RECOMPUTED = ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "CheckpointWrapper")


class SkeletonError(UsageError):
    """This model has no skeleton; the message is a sentence that says why."""


def inner_model(module: nn.Module) -> nn.Module:
    """The model inside DDP, FSDP and torch.compile wrappers."""
    found: Any = module
    while True:
        if issubclass(type(found), (DistributedDataParallel, loaded_class(*_SHARDED))):
            found = found.module
        elif issubclass(type(found), loaded_class(*_COMPILED)):
            found = found._orig_mod
        else:
            inner: nn.Module = found
            return inner


def is_recomputed(module: nn.Module) -> bool:
    """Whether the module uses activation checkpointing."""
    forward = vars(module).get("forward")
    is_patched = isinstance(forward, functools.partial) and forward.func is checkpoint
    return is_patched or isinstance(module, loaded_class(*_RECOMPUTED))


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The user's class of a module whose class wrappers have replaced."""
    kind: Any = type(module)
    if issubclass(kind, loaded_class(*_RECOMPUTED)):
        wrapped: Any = module
        return plain_class(wrapped._checkpoint_wrapped_module)
    wrapper = loaded_class(*_FSDP2)
    if issubclass(kind, wrapper):  # fully_shard puts its own class before the user's
        kind = next(base for base in kind.__mro__ if not issubclass(base, wrapper))
    found: type[nn.Module] = kind
    return found


def skeleton(module: nn.Module) -> bytes:
    """Pickle a function without arguments that makes a model like this one; its tensors are uninitialised.

    Args:
        module: As returned by `inner_model`.

    Raises:
        SkeletonError: the module is only a part of a model, or cannot be sent to another process.
    """
    modules = list(module.modules())
    if is_stage(module) or any(map(is_stage, modules)):
        raise SkeletonError("each rank holds only its own pipeline stages. Name the whole model, or use axon_nb.plan.")
    if any(isinstance(child, loaded_class(*_FSDP1)) for child in modules):
        raise SkeletonError(
            "FSDP1 does not keep the shapes of its parameters. Use `fully_shard` or axon_nb.parallel.FSDP."
        )
    if layer_shardings(modules):
        raise SkeletonError("its layers were sharded by hand, so the full model is unknown. Use axon_nb.plan.")
    file = io.BytesIO()
    try:
        _SkeletonPickler(file, unsharded_parameters(modules)).dump(module)
    except SkeletonError:
        raise
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        raise SkeletonError(
            f"the model cannot be sent to another process ({type(error).__name__}: {first})."
        ) from error
    return pickle.dumps(functools.partial(pickle.loads, file.getvalue()))


class _SkeletonPickler(cloudpickle.Pickler):
    """Pickles tensors without values and modules without wrappers.

    Args:
        file: Output.
        sharded: DTensors of parameters that are currently unsharded, by `id`; units may compute in another dtype.
    """

    def __init__(self, file: io.BytesIO, sharded: Mapping[int, Any]) -> None:
        super().__init__(file)
        self._sharded = sharded

    def reducer_override(self, obj: Any) -> Any:
        """How to rebuild an object; called for all but the plainest types."""
        kind = type(obj)
        if issubclass(kind, torch.Tensor):
            return _reduce_tensor(self._sharded.get(id(obj), obj), kind)
        if issubclass(kind, nn.Module):
            return _reduce_module(obj)
        if issubclass(kind, dist.ProcessGroup | ProcessGroup | World | device_mesh_type()):
            raise SkeletonError(f"the model holds a {kind.__name__}, which does not exist in another process.")
        return super().reducer_override(obj)


def _reduce_tensor(tensor: Any, kind: type) -> Any:
    try:
        shape, dtype = tuple(int(size) for size in tensor.shape), tensor.dtype
    except (RuntimeError, ValueError) as error:  # an uninitialised lazy layer
        raise SkeletonError("a lazy layer has no shape before its first forward.") from error
    return _empty_tensor, (shape, dtype, bool(tensor.requires_grad), issubclass(kind, nn.Parameter))


def _empty_tensor(shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool, is_parameter: bool) -> torch.Tensor:
    result = torch.empty(shape, dtype=dtype)
    return nn.Parameter(result, requires_grad) if is_parameter else result.requires_grad_(requires_grad)


def _reduce_module(module: Any) -> Any:
    if issubclass(type(module), loaded_class(*_RECOMPUTED)):
        return _identity, (module._checkpoint_wrapped_module,)
    module_attributes = set(vars(nn.Module()))
    state = {
        name: value
        for name, value in vars(module).items()
        if (name in _MODEL_ATTRIBUTES or name not in module_attributes)
        and not name.startswith(_STATE_KEY)
        and name not in _DROPPED
        and not (name == "forward" and is_recomputed(module))
    }
    return _empty_module, (plain_class(module),), state, None, None, _restore_module


def _identity(module: nn.Module) -> nn.Module:
    return module


def _empty_module(kind: type[nn.Module]) -> nn.Module:
    result = kind.__new__(kind)
    nn.Module.__init__(result)
    return result


def _restore_module(module: nn.Module, state: dict[str, Any]) -> None:
    vars(module).update(state)
    if isinstance(module, nn.RNNBase):  # RNNs hold their weights a second time, and refer to them weakly
        weights: list[Any] = [getattr(module, name, None) for name in module._flat_weights_names]
        vars(module)["_flat_weights"] = weights
        vars(module)["_flat_weight_refs"] = [weight if weight is None else weakref.ref(weight) for weight in weights]
