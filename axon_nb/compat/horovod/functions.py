"""Broadcast of parameters, optimizer state and objects."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from torch import nn

from axon_nb.comm import broadcast
from axon_nb.compat.horovod.agreement import Call, agree, describe
from axon_nb.compat.horovod.collectives import check_root
from axon_nb.compat.horovod.world import current
from axon_nb.errors import UsageError


def broadcast_parameters(params: Mapping[str, Any] | Iterable[Any], root_rank: int) -> None:
    """Broadcast tensors from one rank to all ranks, in place.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or ``model.parameters()``.
        root_rank: Rank of the source.

    Raises:
        UsageError: An entry is not a tensor.
        HorovodInternalError: A tensor differs in name, shape or dtype between ranks; the message names it.
    """
    if isinstance(params, Mapping):
        entries: list[tuple[str, Any]] = sorted(params.items())
    elif hasattr(params, "__iter__") and not isinstance(params, str | torch.Tensor):
        entries = [item if isinstance(item, tuple) else (f"entry {i}", item) for i, item in enumerate(params)]
    else:
        raise UsageError(f"invalid params of type: {type(params)}; use model.state_dict() or model.named_parameters().")
    others = [name for name, value in entries if not isinstance(value, torch.Tensor)]
    if others:
        raise UsageError(f"broadcast_parameters: {others[0]} is not a tensor: use hvd.broadcast_object for it.")
    root = check_root(root_rank)
    items = tuple(f"{name}: {describe(tensor)} with root rank {root}" for name, tensor in entries)
    agree(Call("broadcast_parameters", None, items))
    for handle in [broadcast(tensor.detach(), src=root, async_op=True) for _, tensor in entries]:
        handle.wait()


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: nn.Module | None = None) -> None:
    """Broadcast optimizer state and options, such as the learning rate, from one rank to all ranks.

    Args:
        optimizer: A torch optimizer, distributed or not, over the same parameters on all ranks.
        root_rank: Rank of the source.
        model: Ignored; for compatibility with Horovod.
    """
    is_root = current().rank == check_root(root_rank)
    file = io.BytesIO()
    if is_root:
        torch.save(optimizer.state_dict(), file)
    content = broadcast_object(file.getvalue(), root_rank)
    if not is_root:
        # By way of the CPU: the root's device may not be this rank's.
        optimizer.load_state_dict(torch.load(io.BytesIO(content), map_location="cpu", weights_only=False))


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Broadcast an object from one rank to all ranks.

    Args:
        obj: Any picklable object; ignored on ranks other than the root.
        root_rank: Rank of the source.
        name: Name for messages; it must be the same on all ranks.

    Returns:
        The object itself on the root, a copy elsewhere.
    """
    root = check_root(root_rank)
    is_root = current().rank == root
    contents: list[Any] = [cloudpickle.dumps(obj) if is_root else None]
    agree(Call("broadcast_object", name, (f"root rank {root}",)))
    dist.broadcast_object_list(contents, src=root)
    return obj if is_root else cloudpickle.loads(contents[0])
