"""The batch of a step: cut into microbatches, and agreed on by all ranks of the pipeline before anything runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from axon_nb.comm.group import ProcessGroup
from axon_nb.comm.kinds import Backend
from axon_nb.comm.torch_names import all_gather_single
from axon_nb.errors import UsageError

__all__ = ["agree", "as_args", "described", "merged", "microbatches", "refused", "rows_of"]


def as_args(x: Any) -> tuple[Any, ...]:
    """What the first stage is called with: a tuple holds several arguments."""
    return x if isinstance(x, tuple) else (x,)


def rows_of(value: Any) -> int:
    """The number of samples: dim 0 of a tensor, or of the first of a tuple; -1 if there is none."""
    first = value[0] if isinstance(value, tuple) and value else value
    return len(first) if isinstance(first, torch.Tensor) and first.ndim else -1


def described(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Shapes and dtypes."""
    return tuple((tuple(arg.shape), arg.dtype, arg.requires_grad) for arg in args if isinstance(arg, torch.Tensor))


def refused(name: str, value: Any, num_microbatches: int, *, several: bool = False) -> str | None:
    """Why this cannot be cut into microbatches; None: it can.

    Args:
        name: What it is called.
        value: A tensor; with `several` it may be a tuple of them.
        num_microbatches: How many.
        several: Whether it may be a tuple.
    """
    if value is None:
        return f"{name} is missing"
    parts = value if several and isinstance(value, tuple) else (value,)
    odd = [part for part in parts if not isinstance(part, torch.Tensor) or part.ndim == 0]
    if odd or not parts:
        kinds = "a tensor, or a tuple of tensors," if several else "a tensor"
        what = "a number" if odd and isinstance(odd[0], torch.Tensor) else type(odd[0]).__name__ if odd else "empty"
        return f"{name} {'is' if len(parts) < 2 else 'holds'} {what}: it is {kinds} with samples along dim 0"
    counts = sorted({len(part) for part in parts})
    if len(counts) > 1:
        return f"{name} holds tensors of {' and '.join(map(str, counts))} samples: they have as many, along dim 0"
    rows = counts[0]
    if rows == 0 or rows % num_microbatches:
        fewer, more = rows // num_microbatches * num_microbatches, -(-max(rows, 1) // num_microbatches)
        fits = " or ".join(str(n) for n in (fewer, more * num_microbatches) if n)
        return (
            f"{name} has {rows} samples and num_microbatches={num_microbatches}: {rows} / {num_microbatches} = "
            f"{rows / num_microbatches:g} is no whole number; a batch of {fits} samples is cut evenly"
        )
    return None


def microbatches(args: tuple[torch.Tensor, ...], count: int) -> list[tuple[torch.Tensor, ...]]:
    """The arguments of each microbatch."""
    return list(zip(*(arg.chunk(count) for arg in args), strict=True))


def merged(outputs: list[Any]) -> Any:
    """The outputs of all microbatches as one batch: along dim 0, scalars stacked."""

    def join(*parts: Any) -> Any:
        if not isinstance(parts[0], torch.Tensor):
            return list(parts)
        return torch.cat(parts) if parts[0].ndim else torch.stack(parts)

    return tree_map(join, *outputs)


def agree(group: ProcessGroup, problem: str | None, *facts: int) -> list[list[int]]:
    """Tell all ranks of the group some numbers, and whether this one can go on; collective.

    Args:
        group: The pipeline's ranks.
        problem: Why this rank cannot go on.
        *facts: As many on all ranks.

    Returns:
        The facts of each rank.

    Raises:
        UsageError: some rank cannot go on; the same on all of them, so that none waits for it.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if group.backend is Backend.NCCL else torch.device("cpu")
    own = torch.tensor([problem is not None, *facts], dtype=torch.int64, device=device)
    everyone = torch.empty(group.size() * len(own), dtype=torch.int64, device=device)
    all_gather_single(everyone, own, group=group.torch_group)
    rows: list[list[int]] = everyone.view(group.size(), -1).tolist()
    if any(row[0] for row in rows):
        texts: list[Any] = [None] * group.size()
        dist.all_gather_object(texts, problem, group=group.torch_group)
        raise UsageError(_first(texts, group))
    return [row[1:] for row in rows]


def _first(texts: Iterable[str | None], group: ProcessGroup) -> str:
    rank, text = next((rank, text) for rank, text in zip(group.ranks, texts, strict=True) if text is not None)
    return f"{text} (on rank {rank})."
