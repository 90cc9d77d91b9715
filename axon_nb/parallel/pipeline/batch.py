"""The batch of a step: split into microbatches, and validated on all ranks before anything runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from axon_nb.comm.collectives.direct import all_gather_single
from axon_nb.comm.group import ProcessGroup
from axon_nb.comm.types import Backend
from axon_nb.errors import UsageError


def as_args(x: Any) -> tuple[Any, ...]:
    """Return the arguments of the first stage; a tuple holds several."""
    return x if isinstance(x, tuple) else (x,)


def num_samples(value: Any) -> int:
    """Return the number of samples: dim 0 of a tensor, or of the first of a tuple; -1 if there is none."""
    first = value[0] if isinstance(value, tuple) and value else value
    return len(first) if isinstance(first, torch.Tensor) and first.ndim else -1


def describe_args(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return shape, dtype and requires_grad of each tensor argument."""
    return tuple((tuple(arg.shape), arg.dtype, arg.requires_grad) for arg in args if isinstance(arg, torch.Tensor))


def find_problem(name: str, value: Any, num_microbatches: int, *, several: bool = False) -> str | None:
    """Return why a value cannot be split into microbatches; None if it can.

    Args:
        name: Name of the value, for the message.
        value: A tensor; with `several`, possibly a tuple of them.
        num_microbatches: Number of microbatches.
        several: Whether a tuple of tensors is allowed.
    """
    if value is None:
        return f"{name} is missing"
    parts = value if several and isinstance(value, tuple) else (value,)
    invalid = [part for part in parts if not isinstance(part, torch.Tensor) or part.ndim == 0]
    if invalid or not parts:
        kinds = "a tensor, or a tuple of tensors," if several else "a tensor"
        what = (
            "a scalar"
            if invalid and isinstance(invalid[0], torch.Tensor)
            else type(invalid[0]).__name__
            if invalid
            else "nothing"
        )
        return f"{name} must be {kinds} with samples along dim 0; got {what}"
    counts = sorted({len(part) for part in parts})
    if len(counts) > 1:
        return f"the tensors of {name} must have equally many samples; got {' and '.join(map(str, counts))}"
    rows = counts[0]
    if rows == 0 or rows % num_microbatches:
        fewer, more = rows // num_microbatches * num_microbatches, -(-max(rows, 1) // num_microbatches)
        fits = " or ".join(str(n) for n in (fewer, more * num_microbatches) if n)
        return (
            f"{name}: the number of samples must be divisible by num_microbatches ({num_microbatches}); got {rows}. "
            f"Use a batch of {fits} samples"
        )
    return None


def split_microbatches(args: tuple[torch.Tensor, ...], count: int) -> list[tuple[torch.Tensor, ...]]:
    """Return the arguments of each microbatch."""
    return list(zip(*(arg.chunk(count) for arg in args), strict=True))


def join_microbatches(outputs: list[Any]) -> Any:
    """Join the outputs of all microbatches to one batch: concatenated along dim 0, scalars stacked."""

    def join(*parts: Any) -> Any:
        if not isinstance(parts[0], torch.Tensor):
            return list(parts)
        return torch.cat(parts) if parts[0].ndim else torch.stack(parts)

    return tree_map(join, *outputs)


def agree(group: ProcessGroup, problem: str | None, *numbers: int) -> list[list[int]]:
    """Exchange some numbers with all ranks of the group, and raise if any rank cannot continue. Collective.

    Args:
        group: The pipeline's ranks.
        problem: Why this rank cannot continue; None if it can.
        *numbers: Numbers to exchange; equally many on all ranks.

    Returns:
        The numbers of each rank.

    Raises:
        UsageError: a rank cannot continue; raised on all ranks, so that none waits.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if group.backend is Backend.NCCL else torch.device("cpu")
    local = torch.tensor([problem is not None, *numbers], dtype=torch.int64, device=device)
    everyone = torch.empty(group.size() * len(local), dtype=torch.int64, device=device)
    all_gather_single(everyone, local, group=group.torch_group)
    rows: list[list[int]] = everyone.view(group.size(), -1).tolist()
    if any(row[0] for row in rows):
        texts: list[Any] = [None] * group.size()
        dist.all_gather_object(texts, problem, group=group.torch_group)
        raise UsageError(_first_problem(texts, group))
    return [row[1:] for row in rows]


def _first_problem(texts: Iterable[str | None], group: ProcessGroup) -> str:
    rank, text = next((rank, text) for rank, text in zip(group.ranks, texts, strict=True) if text is not None)
    return f"{text} (on rank {rank})."
