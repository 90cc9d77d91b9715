"""The few things that a distributed training loop needs besides torch's own."""

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

from axon_nb.comm.errors import CommError
from axon_nb.comm.group import GroupLike, ProcessGroup, resolve
from axon_nb.comm.kinds import Backend
from axon_nb.comm.move import all_gather
from axon_nb.comm.reduce import all_reduce_sum

__all__ = ["accumulating", "load_checkpoint", "reduce_metrics", "save_on_main"]


@contextlib.contextmanager
def accumulating(model: nn.Module, step: int, every: int, *, total: int | None = None) -> Iterator[bool]:
    """Around forward and backward of one micro-batch: only the last of `every` communicates.

    Args:
        model: Has `no_sync`, as DDP; another model is left alone.
        step: Number of the micro-batch, from 0.
        every: Micro-batches of one update.
        total: Micro-batches of the epoch, the same on all ranks: its last one ends an update, however many came before
            it. Without, what is left over is added to the next epoch's first update.

    Yields:
        Whether this is the last one, after which the optimizer steps.

    Raises:
        CommError: `every` is below 1.
    """
    if every < 1:
        raise CommError(f"every={every}: an update has at least 1 micro-batch.")
    last = (step + 1) % every == 0 or step + 1 == total
    no_sync = getattr(model, "no_sync", None)
    with contextlib.nullcontext() if last or no_sync is None else no_sync():
        yield last


def reduce_metrics(
    metrics: Mapping[str, float | torch.Tensor], *, weight: float = 1.0, group: GroupLike = None
) -> dict[str, float]:
    """The means of metrics over all samples of all ranks, in two small messages.

    Args:
        metrics: Means over this rank's samples, the same names on all ranks.
        weight: Number of this rank's samples: ranks with more of them count for more; 0 counts for nothing.
        group: The ranks that take part; None: all.

    Returns:
        The same on every rank; NaN when no rank has a sample.

    Raises:
        CommError: a negative weight; a metric that is no number; ranks bring metrics of different names.
    """
    pg = resolve(group)
    names = sorted(metrics)
    device = torch.device("cuda", torch.cuda.current_device()) if pg.backend is Backend.NCCL else torch.device("cpu")
    values = [_number(name, metrics[name]) * weight if weight else 0.0 for name in names]
    # Every rank brings a row of the same size, whatever its metrics: a difference is told instead of waited for.
    row = torch.tensor([weight, zlib.crc32("\0".join(names).encode())], dtype=torch.float64, device=device)
    heads = all_gather(row, group=pg).view(-1, 2).tolist()
    _check_heads(heads, names, pg)
    sums = all_reduce_sum(torch.tensor(values, dtype=torch.float64, device=device), group=pg).tolist()
    total = sum(theirs for theirs, _ in heads)
    return {name: value / total if total else float("nan") for name, value in zip(names, sums, strict=True)}


def _number(name: str, metric: float | torch.Tensor) -> float:
    try:
        return float(metric)
    except (TypeError, ValueError, RuntimeError):
        raise CommError(f"the metric {name!r} is {metric!r}: it is one number, the mean over samples.") from None


def _check_heads(heads: list[list[float]], names: list[str], pg: ProcessGroup) -> None:
    own = heads[pg.rank()][1]
    for rank, (weight, theirs) in zip(pg.ranks, heads, strict=True):
        if not weight >= 0:
            raise CommError(f"weight={weight:g} on rank {rank}: it is a number of samples, 0 or more.")
        if theirs != own:
            raise CommError(
                f"the metrics here are {names}, and rank {rank} has others: all ranks bring the same names, with "
                "weight=0 where there is nothing to count."
            )


def save_on_main(state: Any, path: str | os.PathLike[str], *, group: GroupLike = None) -> None:
    """Write a checkpoint on rank 0 of the group, and return on all ranks when it is there; collective.

    The file appears under its name only when it is complete. `state` must be whole on rank 0: that of a model, or of a
    DDP model's `module`; a sharded model's `state_dict()` is a collective of its own and comes before this call.

    Raises:
        CommError: rank 0 could not write it; on every rank, so that none waits.
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
        raise CommError(f"the checkpoint {os.fspath(path)} could not be written on rank {pg.ranks[0]}: {outcome[0]}")


def load_checkpoint(path: str | os.PathLike[str], *, device: torch.device | str = "cpu") -> Any:
    """Read what `save_on_main` has written; every rank reads for itself. Tensors and plain containers alone are read.

    Args:
        path: The file.
        device: Where tensors go.

    Raises:
        CommError: there is no such file on this host.
    """
    if not Path(path).exists():
        raise CommError(
            f"there is no checkpoint {os.fspath(path)} on this host: ranks on several hosts need a folder that all see."
        )
    return torch.load(path, map_location=device, weights_only=True)
