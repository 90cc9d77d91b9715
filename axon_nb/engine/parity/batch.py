"""The global batch: variables of which each rank has a part, found by what they contain, and joined on one rank."""

from __future__ import annotations

import ast
import hashlib
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from axon_nb.comm.placements import placed
from axon_nb.errors import UsageError
from axon_nb.records.training.comparison import Place

Path = tuple[Any, ...]


class Batch:
    """The joined parts of the global batch.

    Args:
        leaves: On rank 0, the whole tensors, by name of the variable and keys within.
        places: The part of each rank.
    """

    def __init__(self, leaves: dict[Path, torch.Tensor], places: dict[int, Place]) -> None:
        self.leaves = leaves
        self.places = places

    @property
    def names(self) -> tuple[str, ...]:
        """The variables."""
        return tuple(dict.fromkeys(str(path[0]) for path in self.leaves))


def mentioned_names(code: str, namespace: Mapping[str, Any]) -> set[str]:
    """Return the variables that a cell uses, also within the functions that it calls.

    Args:
        code: The cell, as Python.
        namespace: The variables.
    """
    found: set[str] = set()
    todo = [node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)]
    while todo:
        name = todo.pop()
        if name in found or name not in namespace:
            continue
        found.add(name)
        value = namespace[name]
        if isinstance(value, types.FunctionType) and value.__globals__ is namespace:
            todo += _names_of(value.__code__)
    return found


def _names_of(code: types.CodeType) -> list[str]:
    inner = [name for part in code.co_consts if isinstance(part, types.CodeType) for name in _names_of(part)]
    return [*code.co_names, *inner]


def is_leaf(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be a part of a batch."""
    return bool(tensor.ndim) and not tensor.requires_grad and placed(tensor) is None


def leaves_of(value: Any, path: Path) -> Iterable[tuple[Path, torch.Tensor]]:
    """Yield the tensors within a value that can be parts of a batch, with their paths."""
    if isinstance(value, torch.Tensor):
        if is_leaf(value):
            yield path, value
    elif type(value) in (list, tuple):
        for key, item in enumerate(value):
            yield from leaves_of(item, (*path, key))
    elif type(value) is dict:
        for key, item in value.items():
            yield from leaves_of(item, (*path, key))


def replace_leaves(value: Any, path: Path, change: Callable[[Path, torch.Tensor], torch.Tensor]) -> Any:
    """Return a copy of a value with other tensors; containers are copied, and everything else is the same object."""
    if isinstance(value, torch.Tensor):
        return change(path, value)
    if type(value) in (list, tuple):
        return type(value)(replace_leaves(item, (*path, key), change) for key, item in enumerate(value))
    if type(value) is dict:
        return {key: replace_leaves(item, (*path, key), change) for key, item in value.items()}
    return value


def gather_batch(namespace: Mapping[str, Any], names: Iterable[str]) -> Batch:
    """Find the variables that differ between ranks, and join their parts on rank 0; collective over all ranks.

    Ranks with the same content, such as those of one tensor-parallel group, have the same part.

    Args:
        namespace: The variables.
        names: Those that the cell uses.

    Raises:
        UsageError: the parts do not fit together; on all ranks.
    """
    held = {path: leaf for name in sorted(names) for path, leaf in leaves_of(namespace[name], (name,))}
    sums = {path: (tuple(leaf.shape), str(leaf.dtype), checksum(leaf)) for path, leaf in held.items()}
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, sums)
    everywhere = [path for path in sums if all(path in answer for answer in answers)]
    split = [path for path in everywhere if len({answer[path][2] for answer in answers}) > 1]
    for path in split:
        if len({(shape[1:], dtype) for shape, dtype, _ in (answer[path] for answer in answers)}) > 1:
            name = path[0]
            raise UsageError(
                f"--compare joins `{name}` along its first dimension, but its other dimensions differ between ranks: "
                "pad them, or give all ranks the same."
            )
    contents = [tuple(answer[path][2] for path in split) for answer in answers]
    parts = list(dict.fromkeys(contents))
    owners = [contents.index(part) for part in parts]
    sizes = [answers[owner][split[0]][0][0] if split else 1 for owner in owners]
    for path in split:
        if [answers[owner][path][0][0] for owner in owners] != sizes:
            raise UsageError(
                f"--compare joins `{split[0][0]}` and `{path[0]}` to the global batch, but the parts of a rank have "
                "different lengths: give what is not part of the batch the same values on all ranks."
            )
    places = places_of(contents, sizes)
    gathered: list[Any] | None = [None] * len(answers) if dist.get_rank() == 0 else None
    mine = {path: held[path].detach().cpu() for path in split} if dist.get_rank() in owners else {}
    dist.gather_object(mine, gathered)
    if gathered is None:
        return Batch(dict.fromkeys(split, torch.empty(0, device="cpu")), places)
    joined = {path: torch.cat([gathered[owner][path] for owner in owners]).to(held[path].device) for path in split}
    return Batch(joined, places)


def places_of(contents: Sequence[Any], sizes: Sequence[int]) -> dict[int, Place]:
    """Return the place of each rank.

    Args:
        contents: Of each rank; ranks with equal ones have the same part.
        sizes: Rows of each part, in the order in which the parts first occur.
    """
    parts, places = list(dict.fromkeys(contents)), {}
    for rank, content in enumerate(contents):
        part, peers = parts.index(content), [peer for peer, other in enumerate(contents) if other == content]
        places[rank] = Place(sum(sizes[:part]), sizes[part], sum(sizes), peers.index(rank), len(peers))
    return places


def checksum(tensor: torch.Tensor) -> str:
    """Return a digest of a tensor's bytes."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"").hexdigest()
