"""The batch of a step: cut into microbatches, and agreed on by all ranks of the pipeline before anything runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from axon_nb.comm.errors import CommError
from axon_nb.comm.group import ProcessGroup
from axon_nb.comm.kinds import Backend
from axon_nb.comm.torch_names import all_gather_single

__all__ = ["agree", "as_args", "described", "merged", "microbatches", "refused", "rows_of"]


def as_args(x: Any) -> tuple[Any, ...]:
    """What the first stage is called with: a tuple holds several arguments."""
    return x if isinstance(x, tuple) else (x,)


def rows_of(value: Any) -> int:
    """The number of samples: dim 0 of its tensors; -1 if it has none, -2 if they differ."""
    sizes = {tensor.shape[0] if tensor.ndim else 0 for tensor in _tensors(value)}
    return sizes.pop() if len(sizes) == 1 else -2 if sizes else -1


def described(value: Any) -> tuple[Any, ...]:
    """Shapes and dtypes of its tensors."""
    return tuple((tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in _tensors(value))


def refused(name: str, value: Any, num_microbatches: int) -> str | None:
    """Why this cannot be cut into microbatches; None: it can."""
    if value is None:
        return f"{name} is missing"
    rows = rows_of(value)
    if rows < 0:
        return f"{name} is {type(value).__name__}" + (
            " without a tensor: it is a tensor, or a tuple of tensors, with samples along dim 0"
            if rows == -1
            else " of tensors with different numbers of samples along dim 0"
        )
    if rows == 0 or rows % num_microbatches:
        fewer, more = rows // num_microbatches * num_microbatches, -(-max(rows, 1) // num_microbatches)
        fits = " or ".join(str(n) for n in (fewer, more * num_microbatches) if n)
        return (
            f"{name} has {rows} samples and num_microbatches={num_microbatches}: {rows} / {num_microbatches} = "
            f"{rows / num_microbatches:g} is no whole number; a batch of {fits} samples is cut evenly"
        )
    return None


def microbatches(args: tuple[Any, ...], count: int) -> list[tuple[Any, ...]]:
    """The arguments of each microbatch; what is no tensor is in all of them."""
    leaves, structure = tree_flatten(args)
    cut = [leaf.chunk(count) if isinstance(leaf, torch.Tensor) else (leaf,) * count for leaf in leaves]
    return [tree_unflatten([parts[number] for parts in cut], structure) for number in range(count)]


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
        CommError: some rank cannot go on; the same on all of them, so that none waits for it.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if group.backend is Backend.NCCL else torch.device("cpu")
    own = torch.tensor([problem is not None, *facts], dtype=torch.int64, device=device)
    everyone = torch.empty(group.size() * len(own), dtype=torch.int64, device=device)
    all_gather_single(everyone, own, group=group.torch_group)
    rows: list[list[int]] = everyone.view(group.size(), -1).tolist()
    if any(row[0] for row in rows):
        texts: list[Any] = [None] * group.size()
        dist.all_gather_object(texts, problem, group=group.torch_group)
        raise CommError(_first(texts, group))
    return [row[1:] for row in rows]


def _first(texts: Iterable[str | None], group: ProcessGroup) -> str:
    rank, text = next((rank, text) for rank, text in zip(group.ranks, texts, strict=True) if text is not None)
    return f"{text} (on rank {rank})."


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
