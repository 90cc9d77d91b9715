"""A model without its data, as it was before it was wrapped: what a planner makes one like it from.

Modules are taken apart by their own attributes, so nothing of the user's is called. What wrappers have added is left
out: FSDP2's classes and states, hooks, checkpointed forwards; DTensors count with the shape of the whole. What
`fully_shard` keeps of a module is found by the name that torch's `contract` gives it; a torch that names it otherwise
makes the model one that cannot be sent, which is said in a sentence.
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
from axon_nb.engine.sharding.placement import cut_parameters, whole_parameters
from axon_nb.engine.sharding.sharded import is_stage, loaded, mesh_type
from axon_nb.errors import UsageError

__all__ = ["SkeletonError", "inner_model", "is_recomputed", "plain_class", "skeleton"]

_STATE_KEY = "__composable_api_state_key"
_KEPT = ("training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
"""What of `nn.Module`'s own attributes belongs to the model; the others hold hooks."""
_NOT_SENT = ("_compiled_call_impl", "_flat_weight_refs")
_FSDP1 = ("torch.distributed.fsdp", "FullyShardedDataParallel")
_FSDP2 = ("torch.distributed.fsdp", "FSDPModule")
_SHARDED = ("axon_nb.parallel.data.sharded_model", "ShardedModel")
_COMPILED = ("torch._dynamo.eval_frame", "OptimizedModule")
_RECOMPUTED = ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "CheckpointWrapper")


class SkeletonError(UsageError):
    """There is none of this model; the message is a sentence that says why."""


def inner_model(module: nn.Module) -> nn.Module:
    """What is trained, without DDP, FSDP and torch.compile around it."""
    found: Any = module
    while True:
        if issubclass(type(found), (DistributedDataParallel, loaded(*_SHARDED))):
            found = found.module
        elif issubclass(type(found), loaded(*_COMPILED)):
            found = found._orig_mod
        else:
            inner: nn.Module = found
            return inner


def is_recomputed(module: nn.Module) -> bool:
    """Whether it is computed again in backward, instead of its activations being kept."""
    forward = vars(module).get("forward")
    by_hand = isinstance(forward, functools.partial) and forward.func is checkpoint
    return by_hand or isinstance(module, loaded(*_RECOMPUTED))


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The user's class of a module that wrappers have given one of theirs."""
    kind: Any = type(module)
    if issubclass(kind, loaded(*_RECOMPUTED)):
        wrapped: Any = module
        return plain_class(wrapped._checkpoint_wrapped_module)
    wrapper = loaded(*_FSDP2)
    if issubclass(kind, wrapper):  # fully_shard has put classes of its own before the user's
        kind = next(base for base in kind.__mro__ if not issubclass(base, wrapper))
    found: type[nn.Module] = kind
    return found


def skeleton(module: nn.Module) -> bytes:
    """A function without arguments, pickled, that makes a model like this one with tensors whose values are anything.

    Args:
        module: As `inner_model` gives it.

    Raises:
        SkeletonError: it is only a part of a model, or holds what cannot be sent to another process.
    """
    modules = list(module.modules())
    if is_stage(module) or any(map(is_stage, modules)):
        raise SkeletonError("each rank holds only its stages of a pipeline: name the whole model, or ask axon_nb.plan.")
    if any(isinstance(own, loaded(*_FSDP1)) for own in modules):
        raise SkeletonError("FSDP1 keeps no shapes of its parameters: `fully_shard` or axon_nb.parallel.FSDP does.")
    if cut_parameters(modules):
        raise SkeletonError("its layers are cut over ranks by hand: the model as a whole is nowhere; ask axon_nb.plan.")
    file = io.BytesIO()
    try:
        _SkeletonPickler(file, whole_parameters(modules)).dump(module)
    except SkeletonError:
        raise
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        raise SkeletonError(
            f"the model cannot be sent to another process ({type(error).__name__}: {first})."
        ) from error
    return pickle.dumps(functools.partial(pickle.loads, file.getvalue()))


class _SkeletonPickler(cloudpickle.Pickler):
    """See the module.

    Args:
        file: Where it goes.
        sharded: The DTensors of parameters that are whole for now, by `id`: a unit may compute in another dtype.
    """

    def __init__(self, file: io.BytesIO, sharded: Mapping[int, Any]) -> None:
        super().__init__(file)
        self._sharded = sharded

    def reducer_override(self, obj: Any) -> Any:
        """How an object is made anew; called for all but the plainest types."""
        kind = type(obj)
        if issubclass(kind, torch.Tensor):
            return _reduce_tensor(self._sharded.get(id(obj), obj), kind)
        if issubclass(kind, nn.Module):
            return _reduce_module(obj)
        if issubclass(kind, dist.ProcessGroup | ProcessGroup | World | mesh_type()):
            raise SkeletonError(f"the model holds a {kind.__name__}, which another process does not have.")
        return super().reducer_override(obj)


def _reduce_tensor(tensor: Any, kind: type) -> Any:
    try:
        shape, dtype = tuple(int(size) for size in tensor.shape), tensor.dtype
    except (RuntimeError, ValueError) as error:  # a lazy layer that has seen no input
        raise SkeletonError("a layer of the model does not know its shape before its first forward.") from error
    return _tensor, (shape, dtype, bool(tensor.requires_grad), issubclass(kind, nn.Parameter))


def _tensor(shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool, is_parameter: bool) -> torch.Tensor:
    made = torch.empty(shape, dtype=dtype)
    return nn.Parameter(made, requires_grad) if is_parameter else made.requires_grad_(requires_grad)


def _reduce_module(module: Any) -> Any:
    if issubclass(type(module), loaded(*_RECOMPUTED)):
        return _itself, (module._checkpoint_wrapped_module,)
    own = set(vars(nn.Module()))
    state = {
        name: value
        for name, value in vars(module).items()
        if (name in _KEPT or name not in own)
        and not name.startswith(_STATE_KEY)
        and name not in _NOT_SENT
        and not (name == "forward" and is_recomputed(module))
    }
    return _module, (plain_class(module),), state, None, None, _set_module


def _itself(module: nn.Module) -> nn.Module:
    return module


def _module(kind: type[nn.Module]) -> nn.Module:
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    return made


def _set_module(module: nn.Module, state: dict[str, Any]) -> None:
    vars(module).update(state)
    if isinstance(module, nn.RNNBase):  # it holds its weights a second time, and refers to them weakly
        weights: list[Any] = [getattr(module, name, None) for name in module._flat_weights_names]
        vars(module)["_flat_weights"] = weights
        vars(module)["_flat_weight_refs"] = [own if own is None else weakref.ref(own) for own in weights]
