"""What a step of `axon_nb.parallel.Muon` sends to gather matrices, and what it computes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from axon_nb.plan.hardware import Work
from axon_nb.plan.traffic.layout import LocalTensor, ParallelLayout
from axon_nb.plan.traffic.plan import Traffic, grouped

_ITERATIONS = 5
"""Of Newton-Schulz, as by default."""
_WIDTH = torch.bfloat16.itemsize
"""Bytes of an element that is sent."""


def _turns(layout: ParallelLayout, pp_rank: int) -> Iterator[tuple[dict[str, int], list[LocalTensor]]]:
    """Yield matrices that are updated at once, one on each rank of a group, with the axes that split them."""
    by_group: dict[tuple[str, int], list[LocalTensor]] = {}
    for held in layout.parameters_by_pp_rank[pp_rank]:
        if held.name not in layout.matrices or not held.has_grad:
            continue
        axes = _axes(layout, held)
        if len(axes) == 1:
            (group,) = axes.items()
            by_group.setdefault(group, []).append(held)
        else:
            yield axes, [held]
    for (axis, size), matrices in by_group.items():
        for start in range(0, len(matrices), size):
            yield {axis: size}, matrices[start : start + size]


def _shards(layout: ParallelLayout, held: LocalTensor) -> tuple[str, int]:
    """Return the axis along which FSDP splits a parameter's first dimension, and its size."""
    if layout.strategy in ("ddp", "no_shard"):
        return "", 1
    if layout.strategy == "hybrid_shard":
        return "shard", layout.size("shard")
    return layout.gradient_group(experts=held.is_expert)


def _axes(layout: ParallelLayout, held: LocalTensor) -> dict[str, int]:
    """Return the axes that split each matrix of a parameter, with their sizes; stacks are split between matrices."""
    if len(held.shape) > 2:
        return {}
    tp = layout.size("tp") if held.shape != layout.shapes[held.name] else 1
    return {axis: size for axis, size in (_shards(layout, held), ("tp", tp)) if size > 1}


def _part(layout: ParallelLayout, held: LocalTensor) -> tuple[int, int]:
    """Return the length of the first data rank's part, and its elements."""
    length = -(-held.shape[0] // _shards(layout, held)[1])
    return length, length * math.prod(held.shape[1:])


def step_traffic(layout: ParallelLayout, pp_rank: int) -> Iterator[Traffic]:
    """Yield what the first rank of each group sends in a step to gather matrices, and to return their updates.

    Args:
        layout: A layout whose optimizer is Muon.
        pp_rank: The rank along ``pp``.
    """
    sizes: dict[tuple[str, int], list[int]] = {}
    gathers: dict[tuple[str, int], list[int]] = {}
    for axes, matrices in _turns(layout, pp_rank):
        whole = [_WIDTH * math.prod(layout.shapes[one.name]) for one in matrices]
        if len(axes) == 1:
            axis, size = next(iter(axes.items()))
            sent = sum(_WIDTH * _part(layout, one)[1] for one in matrices)
            sizes.setdefault((axis, size), []).extend((whole[0], sent))
        elif axes:
            # DTensor gathers the axis that splits rows and columns first, and then the whole matrix.
            rows, columns = layout.shapes[matrices[0].name]
            by_columns = matrices[0].shape == (rows, columns // axes["tp"])
            first, second = reversed(axes.items()) if by_columns else axes.items()
            gathers.setdefault(first, []).append(whole[0] // second[1])
            gathers.setdefault(second, []).append(whole[0])
    for found, operation in ((sizes, "all_to_all"), (gathers, "all_gather")):
        for (axis, size), each in found.items():
            yield Traffic(axis, size, operation, "optimizer", "Muon's matrices", grouped(each), pp_rank=pp_rank)


def step_work(layout: ParallelLayout, pp_rank: int) -> Work:
    """Return what a rank computes for its matrices; all wait for the largest of each turn.

    Args:
        layout: A layout whose optimizer is Muon.
        pp_rank: The rank along ``pp``.
    """
    total = Work()
    for _, matrices in _turns(layout, pp_rank):
        works = []
        for one in matrices:
            length, elements = _part(layout, one)
            works.append(_newton_schulz(layout.shapes[one.name][-2:]).times(length if len(one.shape) > 2 else 1))
            # Momentum, Nesterov's step, the cast, decay and update.
            total += Work(bytes=float(elements * (11 * one.dtype.itemsize + 2 * _WIDTH)), ops=5)
        total += max(works, key=lambda work: work.flops)
    return total


def _newton_schulz(shape: Sequence[int]) -> Work:
    """The work of orthogonalizing one matrix."""
    least, most = sorted(shape)
    # x @ x.T, its square, and the product with x.
    flops = _ITERATIONS * (4 * least**2 * most + 2 * least**3)
    return Work(float(flops), float(3 * _WIDTH * least * most), 3 * _ITERATIONS + 3)
