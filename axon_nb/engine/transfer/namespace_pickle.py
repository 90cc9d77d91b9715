"""Pickles a rank's namespace for another rank: as one graph, so that optimizers keep pointing at their parameters.

On the other rank, functions and classes of cells live in that rank's namespace, and process groups become its own
groups of the same name. What belongs to a rank (its place in a sampler, its device) is replaced.
"""

from __future__ import annotations

import functools
import io
import types
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data.distributed import DistributedSampler

from axon_nb.comm.group import ProcessGroup
from axon_nb.comm.world import World
from axon_nb.engine.elastic.pickling import reduce
from axon_nb.engine.groups import install
from axon_nb.engine.groups.wrapper_reset import rebuild_reducer
from axon_nb.engine.live_objects import register
from axon_nb.engine.session import current, own_rank
from axon_nb.engine.sharding.sharded import device_mesh_type, is_sharded, is_stage
from axon_nb.engine.transfer.state_pickle import CannotCopyError, StatePickler
from axon_nb.shell.value_pickle import namespace, reduce_function


class NamespacePickler(StatePickler):
    """Pickles objects of a rank's namespace; see the module."""

    def reduce_object(self, obj: Any, kind: type) -> Any:
        """See `StatePickler`."""
        if issubclass(kind, dist.ProcessGroup):
            return _find_group, (obj.group_name,)
        if kind is types.FunctionType and obj.__globals__ is namespace():
            return reduce_function(obj)
        old_size = 0 if own_rank() is None else current().resized_from
        if old_size and (reduced := reduce(obj, kind, old_size)) is not None:
            return reduced
        self.raise_if_uncopyable(obj, kind)
        if kind is ProcessGroup:
            return (ProcessGroup.wrap, (obj.torch_group,)) if obj.is_member else super().reduce_object(obj, kind)
        if kind is World:
            return World.init, ()
        if kind is torch.device:
            return _make_device, (str(obj), obj == current().device)
        if kind is torch.Generator:
            return _make_generator, (str(obj.device), obj.get_state())
        if issubclass(kind, DistributedDataParallel):
            return _reduce_ddp(obj)
        if issubclass(kind, DistributedSampler):
            of_this_rank = (obj.rank, obj.num_replicas) == (dist.get_rank(), dist.get_world_size())
            return _new, (kind,), (dict(vars(obj)), of_this_rank), None, None, _set_sampler
        if issubclass(kind, LRScheduler):
            return _new, (kind,), dict(vars(obj)), None, None, _set_scheduler
        return super().reduce_object(obj, kind)

    def raise_if_uncopyable(self, obj: Any, kind: type) -> None:
        """Raise CannotCopyError for an object that belongs to this rank or this process alone."""
        if is_sharded(obj):
            raise CannotCopyError("is sharded: each rank holds its own part")
        if is_stage(obj):
            raise CannotCopyError("is a pipeline stage: each rank holds its own")
        if issubclass(kind, device_mesh_type()):
            raise CannotCopyError("is a device mesh: recreate it on all ranks")
        raise_if_of_process(kind)


def raise_if_of_process(kind: type) -> None:
    """Raise CannotCopyError for objects of a type that belongs to its process."""
    if issubclass(kind, io.IOBase) and not issubclass(kind, (io.BytesIO, io.StringIO)):
        raise CannotCopyError("is an open file, which stays with its process")
    if issubclass(kind, types.GeneratorType):
        raise CannotCopyError("is a generator, which stays with its process")


def _new(kind: Any) -> Any:
    return kind.__new__(kind)


def _find_group(name: str) -> Any:
    for group in install.rebuildable_groups():
        if group.group_name == name:
            return group
    return dist.GroupMember.NON_GROUP_MEMBER


def _make_device(name: str, is_rank_device: bool) -> torch.device:
    return current().device if is_rank_device else torch.device(name)


def _make_generator(device: str, state: torch.Tensor) -> torch.Generator:
    target = current().device if device.startswith("cuda") else torch.device(device)
    return torch.Generator(target).set_state(state)


def _reduce_ddp(model: DistributedDataParallel) -> Any:
    state = dict(vars(model))
    group = state.pop("process_group")
    for name in ("reducer", "logger"):
        state.pop(name, None)
    return _new, (type(model),), (state, group), None, None, _set_ddp


def _set_ddp(model: DistributedDataParallel, state: tuple[dict[str, Any], Any]) -> None:
    # A new reducer does not communicate: those of the other ranks were rebuilt when this rank was replaced.
    attributes, model.process_group = state
    torch.nn.Module.__setstate__(model, attributes)
    register(model)
    rebuild_reducer(model)


def _set_sampler(sampler: Any, state: tuple[dict[str, Any], bool]) -> None:
    vars(sampler).update(state[0])
    if state[1]:
        sampler.rank = dist.get_rank()


def _set_scheduler(scheduler: Any, state: dict[str, Any]) -> None:
    vars(scheduler).update(state)
    optimizer = getattr(scheduler, "optimizer", None)
    step = getattr(optimizer, "step", None)
    if step is None or hasattr(step, "_wrapped_by_lr_sched"):
        return

    # A scheduler marks its optimizer's `step`, to warn if it was not called first; the mark is not pickled.
    @functools.wraps(step)
    def marked(*args: Any, **kwargs: Any) -> Any:
        vars(optimizer)["_opt_called"] = True
        return step(*args, **kwargs)

    vars(marked)["_wrapped_by_lr_sched"] = True
    vars(optimizer).update(step=marked, _opt_called=True)
