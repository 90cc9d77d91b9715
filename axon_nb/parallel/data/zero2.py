"""ZeRO-2: all parameters on each rank; gradients and optimizer states of some.

Rajbhandari et al., ZeRO (2020), section 5.2. Torch has no such strategy: FSDP2 keeps shards between steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from axon_nb.comm.collectives.movement import all_gather, broadcast
from axon_nb.comm.collectives.reduction import all_reduce_max
from axon_nb.errors import UsageError
from axon_nb.parallel.data.ddp import broadcast_model
from axon_nb.parallel.data.sharded_model import ZeRO1
from axon_nb.parallel.loop import clip_grad_norm
from axon_nb.parallel.memory import MIB, ShardingStrategy, local_optimizer, partition_parameters


@dataclass
class _Sync:
    """The reduction of gradients of one backward."""

    filling: dict[tuple[int, torch.dtype], list[nn.Parameter]] = field(default_factory=dict)
    """Parameters whose gradients wait to be sent, by owner and dtype."""
    sent: list[tuple[Any, torch.Tensor, list[nn.Parameter] | None]] = field(default_factory=list)
    """Reductions: the work, the gradients, and on their owner the parameters."""
    seen: set[int] = field(default_factory=set)


class ZeRO2(ZeRO1, strategy=ShardingStrategy.GRADIENT_STATE):
    """Keeps all parameters on every rank, and gradients and optimizer states of some: those that `ZeRO1` gives it.

    Backward reduces gradients to the rank that has the optimizer states of their parameters, bucket by bucket; the
    other ranks free them. All ranks must use the same parameters in a step. Takes the arguments of `ZeRO1`; its options
    of DDP are `bucket_size_mb` and `broadcast_buffers`. Clip with `clip_grad_norm` of this class.
    """

    _own_strategy = ShardingStrategy.GRADIENT_STATE

    def _prepare(self, sync_parameters: bool, ddp_options: dict[str, Any]) -> None:
        self._bucket_bytes = ddp_options.pop("bucket_size_mb", 25.0) * MIB
        self._synced_buffers = list(self.module.buffers()) if ddp_options.pop("broadcast_buffers", True) else []
        if ddp_options:
            raise UsageError(
                f"ZeRO2 does not support {next(iter(ddp_options))}=; options are bucket_size_mb and broadcast_buffers."
            )
        if sync_parameters:
            broadcast_model(self.module, self.mesh)
        self._ordered = list(self.module.parameters())
        sizes = [parameter.numel() for parameter in self._ordered]
        parts = partition_parameters(sizes, self.process_group.size())
        self._set_owners([next(rank for rank, part in enumerate(parts) if i in part) for i in range(len(sizes))])
        self._syncing = True
        self._local = False
        self._now = _Sync()
        self._carried: dict[int, torch.Tensor] = {}
        for parameter in self._ordered:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._ready)

    def _set_owners(self, owners: list[int]) -> None:
        self._owners = dict(zip(map(id, self._ordered), owners, strict=True))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward."""
        if torch.is_grad_enabled():
            self._begin()
        return self.module(*args, **kwargs)

    @torch.no_grad()
    def _begin(self) -> None:
        if self._now.seen:
            self.sync_gradients()
        if not self._local:  # what is reduced already must not be reduced again
            for parameter in self._ordered:
                if parameter.grad is not None:
                    self._carried[id(parameter)] = parameter.grad
                    parameter.grad = None
        if self._syncing:
            for buffer in self._synced_buffers:
                broadcast(buffer, group=self.process_group)
        else:
            self._local = True

    @torch.no_grad()
    def _ready(self, parameter: nn.Parameter) -> None:
        if not self._syncing:
            return
        assert parameter.grad is not None
        self._now.seen.add(id(parameter))
        key = self._owners[id(parameter)], parameter.grad.dtype
        waiting = self._now.filling.setdefault(key, [])
        waiting.append(parameter)
        if sum(one.nbytes for one in waiting) >= self._bucket_bytes:
            self._send(key)

    def _send(self, key: tuple[int, torch.dtype]) -> None:
        group, owner, waiting = self.process_group, key[0], self._now.filling.pop(key)
        flat = torch.cat([parameter.grad.flatten() for parameter in waiting if parameter.grad is not None])
        flat /= group.size()
        for parameter in waiting:
            parameter.grad = None
        work = dist.reduce(flat, group.ranks[owner], group=group.torch_group, async_op=True)
        self._now.sent.append((work, flat, waiting if owner == group.rank() else None))

    @torch.no_grad()
    def sync_gradients(self) -> None:
        """Finish reducing the gradients. Collective."""
        if self._local:  # some may have gradients from within no_sync alone
            left = [p for p in self._ordered if p.requires_grad and id(p) not in self._now.seen]
            found = torch.tensor([p.grad is not None for p in left], device=self.mesh.device_type)
            for parameter, anywhere in zip(left, all_reduce_max(found, group=self.process_group).tolist(), strict=True):
                if anywhere:
                    parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    key = self._owners[id(parameter)], parameter.grad.dtype
                    self._now.filling.setdefault(key, []).append(parameter)
        for key in list(self._now.filling):
            self._send(key)
        for work, flat, own in self._now.sent:
            work.wait()
            parts = flat.split([p.numel() for p in own]) if own else ()
            for parameter, part in zip(own or (), parts, strict=True):
                parameter.grad = part.view_as(parameter)
        for parameter in self._ordered:
            if (before := self._carried.pop(id(parameter), None)) is not None:
                parameter.grad = before if parameter.grad is None else parameter.grad.add_(before)
        self._now, self._local = _Sync(), False

    def drop_gradients(self) -> None:
        """Forget what an interrupted backward has left; an abort calls it."""
        self._now, self._local = _Sync(), False
        self._carried.clear()

    def _make_optimizer(
        self, kind: Callable[..., Optimizer], parameters: list[Any], options: dict[str, Any]
    ) -> Optimizer:
        optimizer = super()._make_optimizer(kind, parameters, options)
        if list(map(id, parameters)) != list(map(id, self._ordered)):  # partitioned group by group
            here = {id(p) for group in local_optimizer(optimizer).param_groups for p in group["params"]}
            flags = torch.tensor([id(p) in here for p in self._ordered], device=self.mesh.device_type)
            self._set_owners(all_gather(flags[None].int(), group=self.process_group).argmax(0).tolist())
        optimizer.register_step_pre_hook(lambda *_: self.sync_gradients())
        return optimizer

    def clip_grad_norm(self, max_norm: float, *, norm_type: float = 2.0, groups: Any = ()) -> float:
        """Scale the gradients so that their norm over the whole model is at most `max_norm`. Collective.

        Takes the arguments of `axon_nb.parallel.clip_grad_norm`, and returns the same.
        """
        self.sync_gradients()
        others = list(groups) if isinstance(groups, list | tuple) else [groups]
        return clip_grad_norm(self.module, max_norm, norm_type=norm_type, groups=[*others, self.process_group])

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate gradients inside, whole on each rank; the next backward outside reduces the sum."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before
