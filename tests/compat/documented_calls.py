"""What the ranks bring, call and expect in `documented`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from axon_nb.compat import horovod as hvd

__all__ = [
    "all_of",
    "by_name",
    "deprecated_average",
    "exchanged",
    "gradient_of",
    "half",
    "in_place",
    "late_joiners",
    "on_a_set",
    "on_a_set_expected",
    "own",
    "polled",
    "reducescattered",
    "rows",
    "sparse",
    "splits_of",
    "unchanged",
]


def own(rank: int) -> torch.Tensor:
    """What a rank brings: 2 x 3."""
    return torch.arange(6.0).view(2, 3) + 10 * rank


def all_of(size: int) -> torch.Tensor:
    """What all bring: size x 2 x 3."""
    return torch.stack([own(rank) for rank in range(size)])


def rows(rank: int) -> torch.Tensor:
    """A rank's rows, one more than its number."""
    return torch.full((rank + 1, 2), float(rank))


def gradient_of(function: Callable[[torch.Tensor], torch.Tensor], value: torch.Tensor) -> torch.Tensor:
    """The gradient of the sum of what a function makes of a value."""
    value = value.clone().requires_grad_()
    function(value).sum().backward()
    assert value.grad is not None
    return value.grad


def deprecated_average(rank: int, size: int) -> Any:
    """The result, and the kind of warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = hvd.allreduce(own(rank), average=False)
    return result, [item.category.__name__ for item in caught]


def unchanged(rank: int, size: int) -> torch.Tensor:
    """What was given to an allreduce, afterwards."""
    tensor = own(rank)
    hvd.allreduce(tensor, op=hvd.Sum)
    return tensor


def in_place(rank: int, size: int) -> Any:
    """What was given, and whether it is what was returned."""
    tensor = own(rank)
    return tensor, hvd.allreduce_(tensor, op=hvd.Sum) is tensor


def polled(rank: int, size: int) -> torch.Tensor:
    """The result of an asynchronous call."""
    handle = hvd.allreduce_async(own(rank), op=hvd.Sum)
    while not hvd.poll(handle):
        pass
    return hvd.synchronize(handle)


def by_name(rank: int, size: int) -> list[torch.Tensor]:
    """Three calls that each rank makes in another order."""
    handles = {}
    for turn in range(3):
        number = (turn + rank) % 3
        handles[number] = hvd.allreduce_async(torch.tensor([10.0**number]), name=f"n{number}", op=hvd.Sum)
    return [hvd.synchronize(handles[number]) for number in range(3)]


def late_joiners(rank: int, size: int) -> Any:
    """Rank r has r batches; the last batches, and who joined last."""
    seen = [hvd.allreduce(torch.ones(1), name=f"batch {number}").item() for number in range(rank)]
    return seen, hvd.join()


def on_a_set(rank: int, size: int) -> Any:
    """What the ranks of a process set reduce, gather and broadcast among themselves."""
    outer = hvd.add_process_set([0, size - 1])
    seen: list[Any] = [str(outer), outer.size(), outer.included()]
    if outer.included():
        seen.append(outer.rank())
        seen.append(hvd.allreduce(torch.tensor([1.0 + rank]), process_set=outer, op=hvd.Sum).item())
        seen.append(hvd.allgather(torch.tensor([rank]), process_set=outer).tolist())
        seen.append(hvd.broadcast(torch.tensor([rank]), size - 1, process_set=outer).item())
    hvd.barrier()
    seen += [hvd.remove_process_set(outer), outer.process_set_id, hvd.remove_process_set(hvd.global_process_set)]
    return seen


def on_a_set_expected(rank: int, size: int) -> Any:
    """What `on_a_set` gives."""
    members = [0, size - 1]
    text = f"ProcessSet(process_set_id=1, ranks={members}, mpi_comm=None)"
    inside = [members.index(rank), 1.0 + size, members, size - 1] if rank in members else []
    return [text, 2, rank in members, *inside, True, None, False]


def sparse(rank: int) -> torch.Tensor:
    """A sparse tensor with one row a rank and one of all."""
    return torch.sparse_coo_tensor(torch.tensor([[0, rank + 1]]), torch.ones(2, 2), (5, 2), check_invariants=True)


def reducescattered(rank: int, size: int, op: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """This rank's rows of 4, of which the first ranks have one more."""
    whole = op(torch.stack([torch.arange(8.0).view(4, 2) * (other + 1) for other in range(size)]))
    counts = [4 // size + (other < 4 % size) for other in range(size)]
    return whole.split(counts)[rank]


def half(tensor: torch.Tensor) -> torch.Tensor:
    """As it is in 16 bits."""
    return tensor.half().float()


def splits_of(rank: int, size: int) -> list[int]:
    """Rank r sends r + 1 rows to rank 0 and none to the others but the last, which gets one."""
    return [rank + 1, *[0] * (size - 2), 1]


def exchanged(rank: int, size: int) -> Any:
    """What comes to a rank by these splits, and how many rows from each."""
    counts = [splits_of(other, size)[rank] for other in range(size)]
    return torch.cat([torch.full((count,), float(other)) for other, count in enumerate(counts)]), torch.tensor(counts)
