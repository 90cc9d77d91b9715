"""Clipping gradients by their norm over the whole model, wherever its parts are.

The norm of order p over all elements g of all gradients, each counted once, is

    (sum over parameters, sum over the ranks that hold a part of it, sum over that part: |g| ** p) ** (1 / p)

and max |g| for p = inf: that of a single process. What several ranks hold a copy of is counted on one of them. As in
`torch.nn.utils.clip_grad_norm_`, gradients are multiplied by min(1, max_norm / (norm + 1e-6)).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from axon_nb.comm.errors import CommError
from axon_nb.comm.group import ProcessGroup, resolve
from axon_nb.comm.kinds import Backend, ReduceOp
from axon_nb.comm.reduce import all_reduce

__all__ = ["clip_grad_norm", "grad_norm"]

Part = tuple[torch.Tensor, list[ProcessGroup]]
"""A parameter, and the groups over whose ranks it is cut."""


def clip_grad_norm(
    model: nn.Module | Iterable[nn.Module] | Iterable[torch.Tensor],
    max_norm: float,
    *,
    norm_type: float = 2.0,
    groups: Any = (),
    error_if_nonfinite: bool = False,
) -> float:
    """Scale the gradients so that their norm over the whole model is at most `max_norm`; collective.

    Args:
        model: A model, or several that are parts of one; or parameters, when none of them belongs to the layers of
            `axon_nb.parallel.tensor`, whose parameters do not say themselves that they are parts.
        max_norm: Largest norm that is left alone.
        norm_type: Order of the norm, above 0; `math.inf`: the largest magnitude.
        groups: One or several groups whose ranks have other parameters of the model, such as the stages of a pipeline:
            ``mesh["pp"]``.
        error_if_nonfinite: Raise, on all ranks, when the norm is infinite or no number.

    Returns:
        The norm before, the same on every rank.

    Raises:
        CommError: the order is no positive number; the norm is not finite, where that is an error.
    """
    parts = list(_trainable(model))
    norm = _norm(parts, norm_type, groups)
    if error_if_nonfinite and not math.isfinite(norm):
        raise CommError(f"the norm of the gradients is {norm}, so they cannot be clipped: skip this step.")
    scale = max_norm / (norm + 1e-6)
    # A norm that is no number makes the gradients so as well, as torch does: that is seen, a clip left out is not.
    if not scale >= 1.0:
        for parameter, _ in parts:
            if parameter.grad is not None:
                _local(parameter.grad).mul_(scale)
    return norm


def grad_norm(
    model: nn.Module | Iterable[nn.Module] | Iterable[torch.Tensor], *, norm_type: float = 2.0, groups: Any = ()
) -> float:
    """The norm that `clip_grad_norm` clips by, with its arguments; collective.

    Raises:
        CommError: the order is no positive number.
    """
    return _norm(list(_trainable(model)), norm_type, groups)


@torch.no_grad()
def _norm(parts: list[Part], norm_type: float, groups: Any) -> float:
    if not norm_type > 0:
        raise CommError(f"norm_type={norm_type}: the order of a norm is above 0, or math.inf.")
    largest = math.isinf(norm_type)
    power, op = (1.0, ReduceOp.MAX) if largest else (float(norm_type), ReduceOp.SUM)
    cut: dict[tuple[int, ...], ProcessGroup] = {}
    norms: dict[tuple[tuple[int, ...], ...], list[torch.Tensor]] = {}
    # Also parameters without a gradient, or with an empty part here: which groups are asked then depends on the model
    # alone, and is the same on all of their ranks.
    for parameter, over in parts:
        cut |= {group.ranks: group for group in over}
        found = norms.setdefault(tuple(sorted({group.ranks for group in over})), [])
        if parameter.grad is not None and (gradient := _local(_settled(parameter))).numel():
            wide = torch.float32 if gradient.dtype.itemsize < 4 else None
            found.append(torch.linalg.vector_norm(gradient, norm_type, dtype=wide))
    sums = {key: _joined([torch.stack(_together(some)).double().pow(power)], op) for key, some in norms.items() if some}
    sums |= {key: torch.zeros((), dtype=torch.float64) for key, some in norms.items() if not some}
    for ranks, group in cut.items():
        keys = [key for key in norms if ranks in key]
        sums.update(zip(keys, _over_ranks([sums[key] for key in keys], op, group), strict=True))
    total = _joined(list(sums.values()), op)
    for group in map(resolve, groups if isinstance(groups, list | tuple) else [groups]):
        total = _over_ranks([total], op, group)[0]
    return math.pow(float(total), 1.0 / power)


def _trainable(model: Any) -> Iterator[Part]:
    """Every parameter that is trained, once."""
    seen: set[int] = set()
    for item in [model] if isinstance(model, nn.Module | torch.Tensor) else model:
        for parameter, over in _of_module(item) if isinstance(item, nn.Module) else [(item, _cut_over(item))]:
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter, over


def _of_module(module: nn.Module) -> Iterator[Part]:
    for inner in module.modules():
        # The layers of `axon_nb.parallel.tensor` have plain tensors, and name those that are parts.
        own: dict[str, int] = getattr(inner, "shard_dims", {})
        for name, parameter in inner.named_parameters(recurse=False):
            over = _cut_over(parameter)
            if name in own and isinstance(group := getattr(inner, "group", None), ProcessGroup) and group.size() > 1:
                over.append(group)
            yield parameter, over


def _cut_over(parameter: torch.Tensor) -> list[ProcessGroup]:
    if not isinstance(parameter, DTensor):
        return []
    mesh = parameter.device_mesh
    return [
        resolve(mesh.get_group(dim))
        for dim, placement in enumerate(parameter.placements)
        if mesh.size(dim) > 1 and not placement.is_replicate()
    ]


def _settled(parameter: torch.Tensor) -> torch.Tensor:
    """The gradient, laid out as its parameter: what is still to be summed over ranks is summed."""
    gradient = parameter.grad
    assert gradient is not None
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
        parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
    return gradient


def _local(gradient: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _together(values: list[torch.Tensor], device: torch.device | None = None) -> list[torch.Tensor]:
    return [value.to(values[0].device if device is None else device) for value in values]


def _joined(values: list[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """One number of many, which are float64."""
    if not values:
        return torch.zeros((), dtype=torch.float64)
    flat = torch.cat([value.reshape(-1) for value in _together(values)])
    return flat.max() if op is ReduceOp.MAX else flat.sum()


def _over_ranks(values: list[torch.Tensor], op: ReduceOp, group: ProcessGroup) -> torch.Tensor:
    device = torch.device("cuda", torch.cuda.current_device()) if group.backend is Backend.NCCL else torch.device("cpu")
    total: torch.Tensor = all_reduce(torch.stack(_together(values, device)), op, group=group)
    return total
