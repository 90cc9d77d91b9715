"""The parts of a training loop: gradient accumulation, input checks, gradient clipping, metrics, saving on rank 0.

The norm of order p, over all elements g of all gradients, each counted once, is

    (sum over parameters, sum over the ranks that hold a shard, sum over that shard: |g| ** p) ** (1 / p)

and max |g| for p = inf, as in a single process. Values replicated on several ranks are counted on one of them. As in
`torch.nn.utils.clip_grad_norm_`, gradients are multiplied by min(1, max_norm / (norm + 1e-6)).
"""

from __future__ import annotations

import contextlib
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from axon_nb.comm.collectives.movement import all_gather
from axon_nb.comm.collectives.reduction import all_reduce, all_reduce_sum
from axon_nb.comm.errors import CommError, TensorError
from axon_nb.comm.group import Backend, GroupLike, ProcessGroup, ReduceOp, resolve
from axon_nb.comm.placements import placed
from axon_nb.errors import AxonError, UsageError

Part = tuple[torch.Tensor, list[ProcessGroup]]
"""A parameter, and the groups over which it is sharded."""


@contextlib.contextmanager
def accumulating(model: nn.Module, step: int, every: int, *, total: int | None = None) -> Iterator[bool]:
    """Wrap forward and backward of one micro-batch: only the last of `every` communicates.

    Args:
        model: A model with `no_sync`, such as DDP; other models are left unchanged.
        step: Index of the micro-batch, from 0.
        every: Micro-batches per optimizer step.
        total: Micro-batches per epoch, the same on all ranks; the last one always completes a step. Without it, the
            remainder is added to the next epoch's first step.

    Yields:
        Whether this is the last micro-batch, after which the optimizer should step.

    Raises:
        UsageError: `every` is below 1.
    """
    if every < 1:
        raise UsageError(f"every must be at least 1 micro-batch; got {every}.")
    last = (step + 1) % every == 0 or step + 1 == total
    no_sync = getattr(model, "no_sync", None)
    with contextlib.nullcontext() if last or no_sync is None else no_sync():
        yield last


def reduce_metrics(
    metrics: Mapping[str, float | torch.Tensor], *, weight: float = 1.0, group: GroupLike = None
) -> dict[str, float]:
    """Average metrics over all samples of all ranks, in two small messages.

    Args:
        metrics: Means over this rank's samples; the same names on all ranks.
        weight: Number of samples on this rank, so that ranks with more samples count more; 0 ignores this rank.
        group: The participating ranks; None means all.

    Returns:
        The means, the same on every rank; NaN if no rank has a sample.

    Raises:
        UsageError: a weight is negative, a metric is not a number, or the names differ between ranks.
    """
    pg = resolve(group)
    names = sorted(metrics)
    device = torch.device("cuda", torch.cuda.current_device()) if pg.backend is Backend.NCCL else torch.device("cpu")
    values = [_number(name, metrics[name]) * weight if weight else 0.0 for name in names]
    # Every rank sends a row of the same size, so that a mismatch raises instead of hanging.
    row = torch.tensor([weight, zlib.crc32("\0".join(names).encode())], dtype=torch.float64, device=device)
    headers = all_gather(row, group=pg).view(-1, 2).tolist()
    _check_headers(headers, names, pg)
    sums = all_reduce_sum(torch.tensor(values, dtype=torch.float64, device=device), group=pg).tolist()
    total = sum(other for other, _ in headers)
    return {name: value / total if total else float("nan") for name, value in zip(names, sums, strict=True)}


def _number(name: str, metric: float | torch.Tensor) -> float:
    try:
        return float(metric)
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(f"Metric {name!r} must be one number, the mean over samples; got {metric!r}.") from None


def _check_headers(headers: list[list[float]], names: list[str], pg: ProcessGroup) -> None:
    expected = headers[pg.rank()][1]
    for rank, (weight, other) in zip(pg.ranks, headers, strict=True):
        if not weight >= 0:
            raise UsageError(f"weight must be a number of samples, 0 or more; got {weight:g} on rank {rank}.")
        if other != expected:
            raise UsageError(
                f"Metric names differ: this rank has {names}, rank {rank} has others. All ranks must pass the same "
                "names; use weight=0 on ranks without samples."
            )


def save_on_main(state: Any, path: str | os.PathLike[str], *, group: GroupLike = None) -> None:
    """Write a checkpoint on rank 0 of the group; returns on all ranks once it is complete. Collective.

    The file appears under its name only when complete. `state` must be a full state on rank 0, such as that of a model
    or of a DDP model's `module`. For a sharded model, call its collective `full_state_dict()` on all ranks first.

    Raises:
        CommError: rank 0 could not write the file; raised on every rank.
    """
    pg = resolve(group)
    outcome = [""]
    if pg.rank() == 0:
        target = Path(path)
        draft = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with draft.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(target)
        except Exception as error:
            outcome = [f"{type(error).__name__}: {error}"]
        finally:
            with contextlib.suppress(OSError):
                draft.unlink()
    dist.broadcast_object_list(outcome, pg.ranks[0], group=pg.torch_group)
    if outcome[0]:
        raise CommError(f"Rank {pg.ranks[0]} could not write the checkpoint {os.fspath(path)}: {outcome[0]}")


def load_checkpoint(path: str | os.PathLike[str], *, device: torch.device | str = "cpu") -> Any:
    """Read what `save_on_main` wrote; each rank reads for itself. Reads tensors and plain containers only.

    Args:
        path: The file.
        device: The device to load tensors to.

    Raises:
        UsageError: the file does not exist on this host.
    """
    if not Path(path).exists():
        raise UsageError(
            f"No checkpoint {os.fspath(path)} on this host; if ranks run on several hosts, use a shared folder."
        )
    return torch.load(path, map_location=device, weights_only=True)


def check_inputs(kind: str, device: Callable[[], torch.device], *inputs: Any) -> None:
    """Check that the tensors among a model's inputs are on its kind of device.

    Args:
        kind: The kind of device where the model computes, such as ``cuda``.
        device: Returns the device itself, for the message.
        *inputs: Arguments of the model; tensors are searched for in lists, tuples and dictionaries.

    Raises:
        TensorError: one is on another device.
    """
    if problem := describe_other_device("inputs", kind, device, *inputs):
        raise TensorError(f"The {problem}.")


def describe_other_device(name: str, kind: str, device: Callable[[], torch.device], *values: Any) -> str:
    """Return where the first tensor in `values` is that is not with the model, and the fix; empty if all are.

    Scalars are left out: torch combines them with tensors of any device. For the arguments see `check_inputs`.
    """
    for value in tree_leaves(values):
        if isinstance(value, torch.Tensor) and value.ndim and value.device.type != kind:
            return f"{name} are on {value.device}, the model is on {device()}: use `x.to(device)`"
    return ""


class NonFiniteNormError(AxonError, RuntimeError):
    """The norm of the gradients is infinite or NaN, on all ranks."""


def clip_grad_norm(
    model: nn.Module | Iterable[nn.Module] | Iterable[torch.Tensor],
    max_norm: float,
    *,
    norm_type: float = 2.0,
    groups: Any = (),
    error_if_nonfinite: bool = False,
) -> float:
    """Scale the gradients so that their norm over the whole model is at most `max_norm`. Collective.

    Args:
        model: A model, several parts of one, or parameters. Pass modules, not parameters, if they contain layers of
            `axon_nb.parallel.tensor`: the parameters alone do not show that they are sharded.
        max_norm: Largest norm that is left unchanged.
        norm_type: Order of the norm, above 0; `math.inf` is the largest magnitude.
        groups: One or several groups whose ranks hold other parameters of the model, such as pipeline stages:
            ``mesh["pp"]``.
        error_if_nonfinite: Raise on all ranks if the norm is infinite or NaN.

    Returns:
        The norm before clipping, the same on every rank.

    Raises:
        UsageError: `norm_type` is not positive.
        NonFiniteNormError: the norm is infinite or NaN, and `error_if_nonfinite` is set.
    """
    parts = list(_trainable(model))
    norm = _norm(parts, norm_type, groups)
    if error_if_nonfinite and not math.isfinite(norm):
        raise NonFiniteNormError(f"The gradient norm is {norm}, so the gradients cannot be clipped; skip this step.")
    scale = max_norm / (norm + 1e-6)
    # As in torch, a NaN norm makes all gradients NaN: that is noticed, whereas skipped clipping is not.
    if not scale >= 1.0:
        for parameter, _ in parts:
            if parameter.grad is not None:
                _local(parameter.grad).mul_(scale)
    return norm


def grad_norm(
    model: nn.Module | Iterable[nn.Module] | Iterable[torch.Tensor], *, norm_type: float = 2.0, groups: Any = ()
) -> float:
    """Return the norm that `clip_grad_norm` clips by; same arguments. Collective.

    Raises:
        UsageError: `norm_type` is not positive.
    """
    return _norm(list(_trainable(model)), norm_type, groups)


@torch.no_grad()
def _norm(parts: list[Part], norm_type: float, groups: Any) -> float:
    if not norm_type > 0:
        raise UsageError(f"norm_type must be positive or math.inf; got {norm_type}.")
    largest = math.isinf(norm_type)
    power, op = (1.0, ReduceOp.MAX) if largest else (float(norm_type), ReduceOp.SUM)
    shard_groups: dict[tuple[int, ...], ProcessGroup] = {}
    norms: dict[tuple[tuple[int, ...], ...], list[torch.Tensor]] = {}
    # Includes parameters without a gradient or with an empty shard: which groups communicate then depends on the model
    # alone, and is the same on all their ranks.
    for parameter, groups_of_parameter in parts:
        shard_groups |= {group.ranks: group for group in groups_of_parameter}
        group_norms = norms.setdefault(tuple(sorted({group.ranks for group in groups_of_parameter})), [])
        if parameter.grad is not None and (gradient := _local(_reduced_gradient(parameter))).numel():
            wide = torch.float32 if gradient.dtype.itemsize < 4 else None
            group_norms.append(torch.linalg.vector_norm(gradient, norm_type, dtype=wide))
    sums = {
        key: _combine([torch.stack(_to_one_device(some)).double().pow(power)], op)
        for key, some in norms.items()
        if some
    }
    sums |= {key: torch.zeros((), dtype=torch.float64, device="cpu") for key, some in norms.items() if not some}
    for ranks, group in shard_groups.items():
        keys = [key for key in norms if ranks in key]
        sums.update(zip(keys, _combine_over_ranks([sums[key] for key in keys], op, group), strict=True))
    total = _combine(list(sums.values()), op)
    for group in map(resolve, groups if isinstance(groups, list | tuple) else [groups]):
        total = _combine_over_ranks([total], op, group)[0]
    return math.pow(float(total), 1.0 / power)


def _trainable(model: Any) -> Iterator[Part]:
    """Yield every trainable parameter once."""
    seen: set[int] = set()
    for item in [model] if isinstance(model, nn.Module | torch.Tensor) else model:
        for parameter, over in _module_parts(item) if isinstance(item, nn.Module) else [(item, _shard_groups(item))]:
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter, over


def _module_parts(module: nn.Module) -> Iterator[Part]:
    for inner in module.modules():
        # Layers of `axon_nb.parallel.tensor` hold plain tensors; `shard_dims` names the sharded ones.
        dims: dict[str, int] = getattr(inner, "shard_dims", {})
        for name, parameter in inner.named_parameters(recurse=False):
            over = _shard_groups(parameter)
            if name in dims and isinstance(group := getattr(inner, "group", None), ProcessGroup) and group.size() > 1:
                over.append(group)
            yield parameter, over


def _shard_groups(parameter: torch.Tensor) -> list[ProcessGroup]:
    if (found := placed(parameter)) is None:
        return []
    return [
        resolve(found.mesh.get_group(dim))
        for dim, placement in enumerate(found.placements)
        if found.mesh.size(dim) > 1 and not placement.is_replicate()
    ]


def _reduced_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return the gradient with the placements of its parameter, reducing partial sums over ranks."""
    gradient = parameter.grad
    assert gradient is not None
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
        parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
    return gradient


def _local(gradient: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _to_one_device(values: list[torch.Tensor], device: torch.device | None = None) -> list[torch.Tensor]:
    return [value.to(values[0].device if device is None else device) for value in values]


def _combine(values: list[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """Combine many float64 values into one."""
    if not values:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    flat = torch.cat([value.reshape(-1) for value in _to_one_device(values)])
    return flat.max() if op is ReduceOp.MAX else flat.sum()


def _combine_over_ranks(values: list[torch.Tensor], op: ReduceOp, group: ProcessGroup) -> torch.Tensor:
    device = torch.device("cuda", torch.cuda.current_device()) if group.backend is Backend.NCCL else torch.device("cpu")
    own = torch.stack(_to_one_device(values, device))
    if op is not ReduceOp.MAX:
        total: torch.Tensor = all_reduce(own, op, group=group)
        return total
    # Gloo's maximum forgets the NaN of some ranks: findings/gloo-maximum-forgets-nan.sh.
    is_nan = own.isnan()
    largest, any_nan = all_reduce(torch.stack([own.masked_fill(is_nan, 0.0), is_nan.to(own)]), op, group=group)
    norms: torch.Tensor = largest.masked_fill(any_nan > 0, math.nan)
    return norms
