"""What Horovod documents, sentence by sentence, each with a call and the value that it has then.

The sentences are those of horovod.torch's docstrings (version 0.28) and of its guide to process sets; those in brackets
say what Horovod's own tests assert where its documents are silent. Calls run on every rank, in this order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from axon_nb.compat import horovod as hvd
from tests.compat.documented_calls import (
    all_of,
    by_name,
    deprecated_average,
    exchanged,
    gradient_of,
    half,
    in_place,
    late_joiners,
    on_a_set,
    on_a_set_expected,
    own,
    polled,
    reducescattered,
    rows,
    sparse,
    splits_of,
    unchanged,
)

__all__ = ["CASES", "Case", "run"]


@dataclass(frozen=True)
class Case:
    """One sentence."""

    sentence: str
    call: Callable[[int, int], Any]
    """Of rank and size."""
    expected: Callable[[int, int], Any]
    """The value on that rank."""


CASES: list[Case] = [
    Case("A function that returns the number of Horovod processes.", lambda r, n: hvd.size(), lambda r, n: n),
    Case("A function that returns the Horovod rank of the calling process.", lambda r, n: hvd.rank(), lambda r, n: r),
    Case(
        "if there are seven processes running on a node, their local ranks will be zero through six, inclusive.",
        lambda r, n: (hvd.local_rank(), hvd.local_size()),
        lambda r, n: (r, n),
    ),
    Case(
        "The cross rank of a process corresponds to the rank of the node its is running on.",
        lambda r, n: (hvd.cross_rank(), hvd.cross_size()),
        lambda r, n: (0, 1),
    ),
    Case(
        "A boolean value indicating whether every node in the cluster has same number of ranks.",
        lambda r, n: hvd.is_homogeneous(),
        lambda r, n: True,
    ),
    Case("Returns True if Horovod is initialized", lambda r, n: hvd.is_initialized(), lambda r, n: True),
    Case(
        "Returns True if Gloo is mode is currently enabled at runtime.",
        lambda r, n: (hvd.gloo_enabled(), hvd.mpi_enabled(), hvd.mpi_built(), hvd.ddl_built(), hvd.ccl_built()),
        lambda r, n: (True, False, False, False, False),
    ),
    Case("Defaults to Average if None is given.", lambda r, n: hvd.allreduce(own(r)), lambda r, n: all_of(n).mean(0)),
    Case("The input tensor is not modified.", unchanged, lambda r, n: own(r)),
    Case(
        "Supported op values are Sum, Average, Min, Max, and Product.",
        lambda r, n: [hvd.allreduce(own(r), op=op) for op in (hvd.Sum, hvd.Average, hvd.Min, hvd.Max, hvd.Product)],
        lambda r, n: [all_of(n).sum(0), all_of(n).mean(0), own(0), own(n - 1), all_of(n).prod(0)],
    ),
    Case(
        "average: Use `op` instead. Will be removed in v1.0.",
        deprecated_average,
        lambda r, n: (all_of(n).sum(0), ["DeprecationWarning"]),
    ),
    Case(
        "prescale_factor: Multiplicative factor to scale tensor before allreduce.",
        lambda r, n: hvd.allreduce(own(r), op=hvd.Product, prescale_factor=0.5),
        lambda r, n: (all_of(n) * 0.5).prod(0),
    ),
    Case(
        "postscale_factor: Multiplicative factor to scale tensor after allreduce.",
        lambda r, n: hvd.allreduce(own(r), op=hvd.Max, postscale_factor=0.5),
        lambda r, n: own(n - 1) * 0.5,
    ),
    Case(
        "[the average of whole numbers is truncated]",
        lambda r, n: hvd.allreduce(torch.tensor([-r * r, r * r])),
        lambda r, n: torch.div(torch.tensor([-1, 1]) * sum(k * k for k in range(n)), n, rounding_mode="trunc"),
    ),
    Case(
        "Compress all floating point gradients to 16-bit.",
        lambda r, n: hvd.allreduce(own(r) / 3, compression=hvd.Compression.fp16, op=hvd.Max),
        lambda r, n: half(own(n - 1) / 3),
    ),
    Case(
        "If your input tensor requires gradients, then callings this function will allow gradients to be computed and "
        "backpropagated. [Sum]",
        lambda r, n: gradient_of(lambda x: hvd.allreduce(x, op=hvd.Sum) * (r + 1), own(r)),
        lambda r, n: torch.full((2, 3), float(sum(range(n + 1)))),
    ),
    Case(
        "If your input tensor requires gradients, then callings this function will allow gradients to be computed and "
        "backpropagated. [Average]",
        lambda r, n: gradient_of(lambda x: hvd.allreduce(x) * (r + 1), own(r)),
        lambda r, n: torch.full((2, 3), sum(range(n + 1)) / n),
    ),
    Case(
        "A function that performs in-place averaging or summation of the input tensor over all the Horovod processes.",
        in_place,
        lambda r, n: (all_of(n).sum(0), True),
    ),
    Case(
        "After `poll()` returns `True`, `synchronize()` will return without blocking.",
        polled,
        lambda r, n: all_of(n).sum(0),
    ),
    Case(
        "The reduction operation is keyed by the name. The reduction will not start until all processes are ready to "
        "send and receive the tensor.",
        by_name,
        lambda r, n: [torch.tensor([n * 10.0**number]) for number in range(3)],
    ),
    Case("[a handle that was synchronized gives None]", lambda r, n: hvd.synchronize(10**9), lambda r, n: None),
    Case(
        "Reductions are performed across tensors in the same list position.",
        lambda r, n: hvd.grouped_allreduce([own(r), torch.tensor([r]), own(r)[0]], op=hvd.Sum),
        lambda r, n: [all_of(n).sum(0), torch.tensor([sum(range(n))]), all_of(n).sum(0)[0]],
    ),
    Case(
        "The shape is identical to the input shape, except for the first dimension, which may be greater and is the "
        "sum of all first dimensions of the tensors in different Horovod processes.",
        lambda r, n: hvd.allgather(rows(r)),
        lambda r, n: torch.cat([rows(other) for other in range(n)]),
    ),
    Case(
        "[the gradient of allgather is the average of the gradients of the own rows]",
        lambda r, n: gradient_of(lambda x: hvd.allgather(x) * (r + 1), rows(r)),
        lambda r, n: torch.full((r + 1, 2), sum(range(n + 1)) / n),
    ),
    Case(
        "A function that concatenates each input tensor with the corresponding input tensor on all other Horovod "
        "processes for a list of input tensors.",
        lambda r, n: hvd.grouped_allgather([rows(r), torch.tensor([r])]),
        lambda r, n: [torch.cat([rows(other) for other in range(n)]), torch.arange(n)],
    ),
    Case(
        "A tensor of the same shape and type as `tensor`, with the value broadcasted from root rank.",
        lambda r, n: hvd.broadcast(own(r), n - 1),
        lambda r, n: own(n - 1),
    ),
    Case(
        "[the gradient of broadcast is the average on the root, and zero elsewhere]",
        lambda r, n: gradient_of(lambda x: hvd.broadcast(x, 1) * (r + 1), own(r)),
        lambda r, n: torch.full((2, 3), sum(range(n + 1)) / n if r == 1 else 0.0),
    ),
    Case(
        "If `splits` is not provided, the first dimension is split equally by the number of Horovod processes.",
        lambda r, n: hvd.alltoall(torch.arange(2 * n) + 100 * r),
        lambda r, n: torch.cat([torch.arange(2 * r, 2 * r + 2) + 100 * other for other in range(n)]),
    ),
    Case(
        "If `splits` has been provided: A tensor of integers in rank order describing how many elements in the output "
        "tensor have been received from each worker.",
        lambda r, n: hvd.alltoall(torch.full((r + 2,), float(r)), torch.tensor(splits_of(r, n))),
        exchanged,
    ),
    Case(
        "[the gradient of alltoall goes back to where the rows came from]",
        lambda r, n: gradient_of(lambda x: hvd.alltoall(x, splits_of(r, n))[0] * (r + 1), torch.ones(r + 2)),
        lambda r, n: torch.tensor([1.0] * (r + 1) + [float(n)]),
    ),
    Case(
        "The shape is identical to the input shape, except for the first dimension, which will be divided across the "
        "different Horovod processes.",
        lambda r, n: hvd.reducescatter(torch.arange(8.0).view(4, 2) * (r + 1)),
        lambda r, n: reducescattered(r, n, lambda x: x.mean(0)),
    ),
    Case(
        "op: The reduction operation to combine tensors across different ranks. Defaults to Average. [Sum, scaled]",
        lambda r, n: hvd.reducescatter(torch.arange(8.0).view(4, 2) * (r + 1), op=hvd.Sum, prescale_factor=2.0),
        lambda r, n: reducescattered(r, n, lambda x: 2 * x.sum(0)),
    ),
    Case(
        "[the gradient of reducescatter with Sum is that of all rows, times the number of ranks]",
        lambda r, n: gradient_of(lambda x: hvd.reducescatter(x, op=hvd.Sum) * (r + 1), torch.ones(n, 2)),
        lambda r, n: torch.arange(1.0, n + 1).view(n, 1).expand(n, 2) * n,
    ),
    Case(
        "A list containing tensors of the same rank and type as in `tensors`.",
        lambda r, n: hvd.grouped_reducescatter([torch.arange(8.0).view(4, 2) * (r + 1)] * 2, op=hvd.Sum),
        lambda r, n: [reducescattered(r, n, lambda x: x.sum(0))] * 2,
    ),
    Case(
        "Serializes and broadcasts an object from root rank to all other processes.",
        lambda r, n: hvd.broadcast_object({"rank": r}, root_rank=1),
        lambda r, n: {"rank": 1},
    ),
    Case(
        "The list of objects that were allgathered across all ranks.",
        lambda r, n: hvd.allgather_object("x" * r),
        lambda r, n: ["x" * other for other in range(n)],
    ),
    Case(
        "[sparse tensors are reduced by gathering indices and values]",
        lambda r, n: hvd.sparse_allreduce_async(sparse(r), "sparse", hvd.Average)().to_dense(),
        lambda r, n: torch.stack([sparse(other).to_dense() for other in range(n)]).mean(0),
    ),
    Case(
        "Ranks that reach this function call will stall until all other ranks have reached.",
        lambda r, n: hvd.barrier(),
        lambda r, n: None,
    ),
    Case(
        "All ranks that did not call join() continue to process allreduce operations. Id of the rank that joined last. "
        "[those that joined count as zeros]",
        late_joiners,
        lambda r, n: ([(n - 1 - number) / n for number in range(r)], n - 1),
    ),
    Case(
        "Return rank relative to this process set. Please note that, even with process sets, Horovod operations like "
        "hvd.broadcast() are not parameterized by this relative rank, but by the global rank. If removal is "
        "successful, we will invalidate the process_set object.",
        on_a_set,
        on_a_set_expected,
    ),
    Case(
        "hvd.global_process_set",
        lambda r, n: str(hvd.global_process_set),
        lambda r, n: f"ProcessSet(process_set_id=0, ranks={list(range(n))}, mpi_comm=None)",
    ),
]


def run(rank: int, size: int) -> list[Any]:
    """The values of all cases on this rank; a failure is a value as well."""
    values: list[Any] = []
    for case in CASES:
        try:
            values.append(case.call(rank, size))
        except Exception as error:
            values.append(error)
    return values
