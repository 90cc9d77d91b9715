"""Copies models, optimizers and schedulers of one rank to all others, in place: whatever holds them stays usable."""

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

from axon_nb.engine.namespace import user_variables
from axon_nb.engine.session import current
from axon_nb.engine.sharding.sharded import is_sharded, is_stage, local_shard, unreplicated_reason
from axon_nb.records.protocol.transfer import SyncRecord

_KINDS = {"module": torch.nn.Module, "optimizer": Optimizer, "scheduler": LRScheduler}
_CHUNK_BYTES = 64 << 20


def describe(names: Sequence[str] = ()) -> dict[str, SyncRecord]:
    """Describe what could be copied to or from this rank, by name of the variable.

    Args:
        names: Which variables; empty: all modules, optimizers and schedulers.
    """
    variables = {name: value for name, value in _variables() if not names or name in names}
    parts = {name: {id(tensor) for tensor in _tensors(value)} for name, value in variables.items() if _kind(value)}
    records: dict[str, SyncRecord] = {}
    for name, value in variables.items():
        kind = _kind(value)
        if not kind:
            if name in names:
                records[name] = SyncRecord("", obstacle="is not a module, optimizer or scheduler")
            continue
        earlier = (
            other for other, record in records.items() if record.kind == kind == "module" and not record.contained_in
        )
        contained_in = next((other for other in earlier if parts[name] <= parts[other]), "") if parts[name] else ""
        records[name] = SyncRecord(
            kind,
            digest=_digest(value),
            bytes=sum(tensor.nbytes for tensor in map(local_shard, _tensors(value))) if not _lazy(value) else 0,
            obstacle=_copy_obstacle(value),
            contained_in=contained_in,
        )
    return records


def broadcast(source: int, names: Sequence[str]) -> None:
    """Copy these variables of rank `source` to all others; collective over all ranks, which all have them."""
    variables = dict(_variables())
    for name in names:
        value = variables[name]
        if isinstance(value, torch.nn.Module):
            for tensor in _tensors(value):
                _broadcast(local_shard(tensor), source)
        else:
            _share_state(value, source)


def _variables() -> Iterator[tuple[str, Any]]:
    variables = user_variables(current().kernel.shell)
    yield from sorted(variables.items(), key=lambda item: (not _wraps(item[1]), item[0]))


def _wraps(value: Any) -> bool:
    # A wrapper comes before its content: `model = DDP(net)` is reported, and `net` is copied with it.
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


def _copy_obstacle(value: Any) -> str:
    if is_stage(value):
        return "is a pipeline stage"
    if is_sharded(value):
        return "is sharded over ranks"
    if _lazy(value):
        return "has parameters without values yet"
    zero = getattr(sys.modules.get("torch.distributed.optim"), "ZeroRedundancyOptimizer", None)
    if zero is not None and issubclass(type(value), zero):
        return "has its state sharded over ranks"
    return unreplicated_reason(_tensors(value))


def _digest(value: Any) -> str:
    shapes = [type(value).__qualname__]
    shapes += [f"{tuple(tensor.shape)}{tensor.dtype}" for tensor in _tensors(value) if not _lazy(value)]
    return hashlib.sha256("\n".join(shapes).encode()).hexdigest()[:16]


def _broadcast(tensor: torch.Tensor, source: int) -> None:
    """Broadcast in place, as bytes, because Gloo lacks some dtypes."""
    dense = tensor.detach().to(_transfer_device(tensor)).contiguous()
    buffer = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)  # one element may have any stride
    for chunk in buffer.split(_CHUNK_BYTES):
        dist.broadcast(chunk, source)
    if current().config.rank != source:
        tensor.copy_(buffer.view(tensor.dtype).reshape(tensor.shape))


def _transfer_device(tensor: torch.Tensor) -> torch.device:
    return current().device if dist.get_backend() == "nccl" else tensor.device


def _share_state(value: Any, source: int) -> None:
    is_source, steps = current().config.rank == source, current().steps
    counts_steps = isinstance(value, Optimizer)
    size = torch.zeros(1, dtype=torch.int64, device="cpu")
    payload = torch.empty(0, dtype=torch.uint8, device="cpu")
    if is_source:
        file = io.BytesIO()
        torch.save({"state": value.state_dict(), "steps": steps.of(value) if counts_steps else 0}, file)
        payload = torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)
        size[0] = payload.numel()
    _broadcast(size, source)
    if not is_source:
        payload = torch.empty(int(size), dtype=torch.uint8, device="cpu")
    _broadcast(payload, source)
    if is_source:
        return
    # Weights only: the content is numbers, and Gloo's connections are not authenticated.
    content = torch.load(io.BytesIO(payload.numpy().tobytes()), map_location="cpu", weights_only=True)
    value.load_state_dict(content["state"])
    if counts_steps:
        steps.set(value, content["steps"])
