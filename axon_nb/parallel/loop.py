"""Small helpers for distributed training loops."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from axon_nb.comm.collectives.movement import all_gather
from axon_nb.comm.collectives.reduction import all_reduce_sum
from axon_nb.comm.errors import CommError
from axon_nb.comm.group import GroupLike, ProcessGroup, resolve
from axon_nb.comm.types import Backend
from axon_nb.errors import UsageError


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
