"""Copying models, optimizers and schedulers of one rank to all others, in place: what holds them stays usable."""

from __future__ import annotations

import hashlib
import io
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from axon_nb.engine.namespace import users_variables
from axon_nb.engine.session import current
from axon_nb.engine.sharding.sharded import is_sharded, is_stage, local_part, why_apart
from axon_nb.records.protocol.transfer import SyncRecord

__all__ = ["describe", "give_and_take"]

_KINDS = {"module": torch.nn.Module, "optimizer": Optimizer, "scheduler": LRScheduler}
_PIECE = 64 << 20


def describe(names: Sequence[str] = ()) -> dict[str, SyncRecord]:
    """What could be copied to or from this rank, by name of the variable.

    Args:
        names: Which variables; empty: all modules, optimizers and schedulers.
    """
    found = {name: value for name, value in _variables() if not names or name in names}
    parts = {name: {id(tensor) for tensor in _tensors(value)} for name, value in found.items() if _kind(value)}
    told: dict[str, SyncRecord] = {}
    for name, value in found.items():
        kind = _kind(value)
        if not kind:
            if name in names:
                told[name] = SyncRecord("", why_not="is no module, optimizer or scheduler")
            continue
        earlier = (other for other, record in told.items() if record.kind == kind == "module" and not record.within)
        within = next((other for other in earlier if parts[name] <= parts[other]), "") if parts[name] else ""
        told[name] = SyncRecord(
            kind,
            digest=_digest(value),
            bytes=sum(tensor.nbytes for tensor in map(local_part, _tensors(value))) if not _lazy(value) else 0,
            why_not=_why_not(value),
            within=within,
        )
    return told


def give_and_take(source: int, names: Sequence[str]) -> None:
    """Make these variables what they are on rank `source`; collective over all ranks, which all have them."""
    variables = dict(_variables())
    for name in names:
        value = variables[name]
        if isinstance(value, torch.nn.Module):
            for tensor in _tensors(value):
                _broadcast(local_part(tensor), source)
        else:
            _share_state(value, source)


def _variables() -> Iterator[tuple[str, Any]]:
    variables = users_variables(current().kernel.shell)
    yield from sorted(variables.items(), key=lambda item: (not _wraps(item[1]), item[0]))


def _wraps(value: Any) -> bool:
    # A wrapper before what it wraps: `model = DDP(net)` is told, and `net` comes with it.
    return issubclass(type(value), torch.nn.parallel.DistributedDataParallel)


def _kind(value: Any) -> str:
    # type() and not isinstance: lazy proxies answer the latter with side effects.
    return next((name for name, kind in _KINDS.items() if issubclass(type(value), kind)), "")


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.nn.Module):
        return [*value.parameters(), *value.buffers()]
    if isinstance(value, Optimizer):
        return [parameter for group in value.param_groups for parameter in group["params"]]
    return []


def _lazy(value: Any) -> bool:
    return any(torch.nn.parameter.is_lazy(tensor) or tensor.is_meta for tensor in _tensors(value))


def _why_not(value: Any) -> str:
    if is_stage(value):
        return "is a stage of a pipeline"
    if is_sharded(value):
        return "is split over ranks"
    if _lazy(value):
        return "has parameters without values yet"
    zero = getattr(sys.modules.get("torch.distributed.optim"), "ZeroRedundancyOptimizer", None)
    if zero is not None and issubclass(type(value), zero):
        return "has its state split over ranks"
    return why_apart(_tensors(value))


def _digest(value: Any) -> str:
    shapes = [type(value).__qualname__]
    shapes += [f"{tuple(tensor.shape)}{tensor.dtype}" for tensor in _tensors(value) if not _lazy(value)]
    return hashlib.sha256("\n".join(shapes).encode()).hexdigest()[:16]


def _broadcast(tensor: torch.Tensor, source: int) -> None:
    """In place; as bytes, since Gloo has not all types."""
    carrier = tensor.detach().to(_carrier(tensor)).contiguous().reshape(-1).view(torch.uint8)
    for piece in carrier.split(_PIECE):
        dist.broadcast(piece, source)
    if current().config.rank != source:
        tensor.copy_(carrier.view(tensor.dtype).reshape(tensor.shape))


def _carrier(tensor: torch.Tensor) -> torch.device:
    return current().device if dist.get_backend() == "nccl" else tensor.device


def _share_state(value: Any, source: int) -> None:
    own, steps = current().config.rank == source, current().steps
    counted = isinstance(value, Optimizer)
    size, parcel = torch.zeros(1, dtype=torch.int64), torch.empty(0, dtype=torch.uint8)
    if own:
        file = io.BytesIO()
        torch.save({"state": value.state_dict(), "steps": steps.of(value) if counted else 0}, file)
        parcel = torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)
        size[0] = parcel.numel()
    _broadcast(size, source)
    if not own:
        parcel = torch.empty(int(size), dtype=torch.uint8)
    _broadcast(parcel, source)
    if own:
        return
    # Weights only: these are numbers, and what comes over Gloo's connections proves nobody's identity.
    content = torch.load(io.BytesIO(parcel.numpy().tobytes()), map_location="cpu", weights_only=True)
    value.load_state_dict(content["state"])
    if counted:
        steps.set(value, content["steps"])
