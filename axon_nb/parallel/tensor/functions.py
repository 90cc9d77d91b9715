"""Collectives that gradients flow through, in pairs: what one does forward, its partner does backward.

Shoeybi et al., Megatron-LM (2019), section 3: `f` is `copy_to_ranks`, `g` is `sum_over_ranks`.
"""

from __future__ import annotations

from typing import Any

import torch

from axon_nb.comm.group import ProcessGroup
from axon_nb.comm.move import all_gather
from axon_nb.comm.reduce import all_reduce_sum

__all__ = ["copy_to_ranks", "gather_features", "split_features", "sum_over_ranks"]


class _Copy(torch.autograd.Function):
    """Forward the same on all ranks, backward the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduce_sum(gradient.clone(memory_format=torch.contiguous_format), group=ctx.group), None


class _Sum(torch.autograd.Function):
    """Forward the sum over ranks, backward the same for all."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        total: torch.Tensor = all_reduce_sum(x.clone(memory_format=torch.contiguous_format), group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    """Forward all features, backward each rank's own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        joined: torch.Tensor = all_gather(x, dim=-1, group=group)
        return joined.contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.chunk(ctx.group.size(), dim=-1)[ctx.group.rank()].contiguous(), None


class _Split(torch.autograd.Function):
    """Forward each rank's own features, backward all."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.chunk(group.size(), dim=-1)[group.rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        joined: torch.Tensor = all_gather(gradient, dim=-1, group=ctx.group)
        return joined.contiguous(), None


def copy_to_ranks(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """`x`, which all ranks have; its gradient is the sum of theirs."""
    result: torch.Tensor = _Copy.apply(x, group)  # type: ignore[no-untyped-call]
    return result


def sum_over_ranks(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """The sum over ranks; each rank's part gets the whole gradient."""
    result: torch.Tensor = _Sum.apply(x, group)  # type: ignore[no-untyped-call]
    return result


def gather_features(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """(…, features / ranks) of each rank to (…, features)."""
    result: torch.Tensor = _Gather.apply(x, group)  # type: ignore[no-untyped-call]
    return result


def split_features(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """(…, features), which all ranks have, to this rank's (…, features / ranks)."""
    result: torch.Tensor = _Split.apply(x, group)  # type: ignore[no-untyped-call]
    return result
