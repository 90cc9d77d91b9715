"""The short way of a collective: for tensors that need nothing done to them, with little between call and wire.

Such a tensor is torch's own, dense, on the CPU, without gradient and of a dtype that Gloo knows; its group is one of
Gloo's, and no mode of torch looks on. What is to be checked for it, and the options that it is sent with, are known
beforehand. All else, and all that is wrong, is left to the careful way, which knows what to do and to say: for it the
functions here return None, before anything is sent.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d
from torch.overrides import has_torch_function

from axon_nb.comm import direct
from axon_nb.comm.carry import NATIVE
from axon_nb.comm.checks import is_checking
from axon_nb.comm.group import ProcessGroup, resolve
from axon_nb.comm.kinds import Backend, ReduceOp
from axon_nb.comm.spans import now
from axon_nb.records.span import span_of
from axon_nb.records.trace import emit

__all__ = ["all_gather", "all_reduce", "broadcast", "reduce_scatter"]

_Tensor, _STRIDED, _AVERAGE, _CPU = torch.Tensor, torch.strided, ReduceOp.AVERAGE, torch.device("cpu")
_is_compiling, _World = torch.compiler.is_compiling, direct.TorchWorld


class _Lane:
    """What the short way has to know of a group. It does not keep the group alive."""

    __slots__ = ("gather", "global_rank", "group", "name", "native", "records", "scatter", "size")

    def __init__(self, own: ProcessGroup) -> None:
        torch_group, facts = own.torch_group, own.facts
        self.group: Any = weakref.ref(torch_group, functools.partial(_lanes.pop, id(torch_group)))
        self.size, self.name, self.global_rank = len(facts.ranks), facts.name, facts.ranks[facts.rank]
        self.records = not facts.emits_spans
        self.native = direct.is_native(torch_group)
        """Whether its backend is called: torch's dispatcher, which is between, does nothing more for such a tensor."""
        self.gather: str = direct.BACKENDS[0] if self.native else direct.GATHER
        self.scatter: str = direct.BACKENDS[1] if self.native else direct.SCATTER

    def carrier(self) -> Any:
        """What carries the calls; asked for each time, as it may be exchanged."""
        return self.group()._get_backend(_CPU) if self.native else self.group()

    def over(self, name: str, start_ns: int, size: int) -> None:
        """One call is over."""
        if self.records:
            emit(span_of((self.global_rank, "collective", name, start_ns, now(), self.name, size, -1, -1, 0)))


_lanes: dict[int, _Lane] = {}
"""By the identity of torch's group, as long as it lives: a dictionary of weak keys takes ten times as long."""


def _lane(tensor: Any, group: Any) -> _Lane | None:
    """The lane of a group, when this tensor may take it now."""
    if (
        direct.IS_MISSING
        or type(tensor) is not _Tensor
        or not tensor.is_cpu
        or tensor.dtype not in NATIVE
        or tensor.requires_grad
        or tensor.layout is not _STRIDED
        or not tensor.is_contiguous()
        or is_checking()
        or direct.num_modes()
        or has_torch_function((tensor,))
        or _is_compiling()
    ):
        return None
    world: Any = c10d._world
    if type(world) is not _World or world._pg_coalesce_state:
        return None  # a mock world's, or calls are collected
    torch_group = world._default_pg if group is None else group._torch if type(group) is ProcessGroup else group
    return _lanes.get(id(torch_group)) or _opened(group)


def _opened(group: Any) -> _Lane | None:
    own = resolve(group)
    if own.backend is not Backend.GLOO or not own.is_member:
        return None
    return _lanes.setdefault(id(own.torch_group), _Lane(own))


@functools.cache
def _reducing(op: ReduceOp) -> Any:
    return direct.options_of("AllreduceOptions", False, reduceOp=op.torch_op)


@functools.cache
def _scattering(op: ReduceOp) -> Any:
    return direct.options_of("ReduceScatterOptions", False, reduceOp=op.torch_op)


@functools.cache
def _moving(root: int) -> Any:
    return direct.options_of("BroadcastOptions", False, rootRank=root, rootTensor=0)


@functools.cache
def _gathering() -> Any:
    return direct.options_of("AllgatherOptions", False)


def _reduces(tensor: torch.Tensor, op: Any) -> bool:
    return type(op) is ReduceOp and (op is not _AVERAGE or tensor.is_floating_point())


def all_reduce(tensor: Any, op: Any, group: Any) -> Any:
    """`tensor`, combined over ranks in place; None: it takes the careful way."""
    if (lane := _lane(tensor, group)) is None or not _reduces(tensor, op):
        return None
    start: int = now()
    work = lane.carrier().allreduce([tensor], _reducing(op))
    size = tensor.nbytes  # while it is under way
    if work is not None:  # else the group has waited itself
        work.wait()
    if op is _AVERAGE and lane.size > 1:
        tensor.div_(lane.size)
    lane.over("all_reduce", start, size)
    return tensor


def broadcast(tensor: Any, src: Any, group: Any) -> Any:
    """`tensor`, as rank `src` has it, in place; None: it takes the careful way."""
    if (lane := _lane(tensor, group)) is None or type(src) is not int or not 0 <= src < lane.size:
        return None
    start: int = now()
    work = lane.carrier().broadcast([tensor], _moving(src))
    size = tensor.nbytes
    if work is not None:
        work.wait()
    lane.over("broadcast", start, size)
    return tensor


def all_gather(tensor: Any, group: Any) -> Any:
    """The tensors of all ranks, joined along dim 0; None: it takes the careful way."""
    if (lane := _lane(tensor, group)) is None or not tensor.ndim:
        return None
    rows, *rest = tensor.shape
    start: int = now()
    whole = tensor.new_empty(rows * lane.size, *rest)
    work = getattr(lane.carrier(), lane.gather)(whole, tensor, _gathering())
    size = tensor.nbytes
    if work is not None:
        work.wait()
    lane.over("all_gather", start, size)
    return whole


def reduce_scatter(tensor: Any, op: Any, group: Any) -> Any:
    """This rank's rows of the combined tensor; None: it takes the careful way."""
    if (lane := _lane(tensor, group)) is None or not tensor.ndim or not _reduces(tensor, op):
        return None
    rows, *rest = tensor.shape
    if rows % lane.size:
        return None
    start: int = now()
    part = tensor.new_empty(rows // lane.size, *rest)
    work = getattr(lane.carrier(), lane.scatter)(part, tensor, _scattering(op))
    size = tensor.nbytes
    if work is not None:
        work.wait()
    if op is _AVERAGE:
        part.div_(lane.size)
    lane.over("reduce_scatter", start, size)
    return part
