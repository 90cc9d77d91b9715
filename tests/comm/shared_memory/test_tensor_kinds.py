"""Every kind of tensor in every operation: a right result, or an error before any data moves; never a signal."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from tests.support.ranks import RankWorld

Make = Callable[[int], Any]


class Named(torch.Tensor):
    """A subclass that holds its elements itself."""


def dtensor(rank: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    return distribute_tensor(torch.full((4,), rank + 1.0), init_device_mesh("cpu", (2,)), [Replicate()])


def batched(rank: int) -> Any:
    """What a function sees that `torch.func.vmap` maps."""
    seen: list[Any] = []
    torch.func.vmap(lambda row: seen.append(row) or row)(torch.full((2, 4), rank + 1.0))
    return seen[0]


def fake(rank: int) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.full((4,), rank + 1.0)


def freed(rank: int) -> Any:
    tensor = torch.full((4,), rank + 1.0)
    tensor.untyped_storage().resize_(0)
    return tensor


def shrunk(rank: int) -> Any:
    tensor = torch.full((4,), rank + 1.0)
    tensor.untyped_storage().resize_(8)
    return tensor


def two(rank: int) -> Any:
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(torch.full((4,), rank + 1.0), torch.full((4,), rank + 1.0))


REFUSED: dict[str, Make] = {
    "DTensor": dtensor,
    "parameter of FSDP2": lambda rank: torch.nn.Parameter(dtensor(rank)),
    "FakeTensor": fake,
    "batched by vmap": batched,
    "quantized": lambda rank: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8),
    "wrapper subclass": two,
    "meta": lambda rank: torch.ones(4, device="meta"),
    "nested": lambda rank: torch.nested.nested_tensor([torch.ones(2), torch.ones(2)]),
    "nested jagged": lambda rank: torch.nested.nested_tensor([torch.ones(2), torch.ones(2)], layout=torch.jagged),
    "sparse rows": lambda rank: torch.eye(4).to_sparse_csr(),
    "mkldnn": lambda rank: torch.ones(4).to_mkldnn(),
    "freed storage": freed,
    "shrunk storage": shrunk,
}
ACCEPTED: dict[str, Make] = {
    "plain": lambda rank: torch.full((4,), rank + 1.0),
    "parameter": lambda rank: torch.nn.Parameter(torch.full((4,), rank + 1.0)),
    "sparse": lambda rank: torch.full((4,), rank + 1.0).to_sparse(),
    "imaginary parts": lambda rank: torch.complex(torch.zeros(4), torch.full((4,), rank + 1.0)).imag,
    "subclass with memory": lambda rank: torch.full((4,), rank + 1.0).as_subclass(Named),
    "negative view": lambda rank: torch.complex(torch.zeros(4), torch.full((4,), -rank - 1.0)).conj().imag,
    "every second": lambda rank: torch.full((8,), rank + 1.0)[::2],
    "transposed": lambda rank: torch.full((2, 2), rank + 1.0).t(),
    "no elements": lambda rank: torch.ones(0),
    "part of a storage": lambda rank: torch.full((9,), rank + 1.0)[3:7],
    "result of a functional collective": lambda rank: functional.all_reduce(
        torch.full((4,), rank + 1.0), "sum", dist.group.WORLD
    ),
}


OPERATIONS: dict[str, Callable[[Any, int], Any]] = {
    "all_reduce": lambda tensor, rank: dist.all_reduce(tensor),
    "all_reduce_coalesced": lambda tensor, rank: dist.all_reduce_coalesced([tensor]),
    "broadcast": lambda tensor, rank: dist.broadcast(tensor, 0),
    "reduce": lambda tensor, rank: dist.reduce(tensor, 0),
    "all_gather": lambda tensor, rank: dist.all_gather([torch.ones(4), torch.ones(4)], tensor),
    "all_gather outputs": lambda tensor, rank: dist.all_gather([tensor, tensor], torch.ones(4)),
    "all_gather_into_tensor": lambda tensor, rank: dist.all_gather_into_tensor(torch.ones(8), tensor),
    "reduce_scatter_tensor": lambda tensor, rank: dist.reduce_scatter_tensor(tensor, torch.ones(8)),
    "scatter": lambda tensor, rank: dist.scatter(tensor, [torch.ones(4), torch.ones(4)] if rank == 0 else None),
    "gather": lambda tensor, rank: dist.gather(tensor, [torch.ones(4), torch.ones(4)] if rank == 0 else None),
    "reduce_scatter": lambda tensor, rank: dist.reduce_scatter(tensor, [torch.ones(4), torch.ones(4)]),
    "reduce_scatter inputs": lambda tensor, rank: dist.reduce_scatter(torch.ones(4), [tensor, tensor]),
    "all_to_all": lambda tensor, rank: dist.all_to_all([tensor, tensor], [torch.ones(4), torch.ones(4)]),
    "batch_isend_irecv": lambda tensor, rank: [
        work.wait() for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, 1 - rank)])
    ],
    "send": lambda tensor, rank: dist.send(tensor, 1 - rank),
    "recv": lambda tensor, rank: dist.recv(tensor, 1 - rank),
    "all_to_all_single": lambda tensor, rank: dist.all_to_all_single(tensor, torch.ones(4)),
}


def attempt(world: Any, make: Make, operation: Callable[[Any, int], Any]) -> tuple[str, float]:
    """The kind of error, if any, and what a plain call gives then."""
    rank, error = dist.get_rank(), ""
    try:
        operation(make(rank), rank)
    except Exception as raised:
        error = type(raised).__name__
    after = torch.ones(1)
    dist.all_reduce(after)
    return error, after.item()


def sums(world: Any, make: Make) -> list[float]:
    tensor = make(dist.get_rank())
    dist.all_reduce(tensor)
    return list((tensor.to_dense() if tensor.is_sparse else torch.as_tensor(tensor)).flatten().tolist())


@pytest.fixture(scope="module")
def world() -> Iterator[RankWorld]:
    """Two ranks over shared memory."""
    world = RankWorld(2, backend="shm")
    yield world
    world.end()


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("kind", REFUSED)
def test_tensor_without_host_memory_is_rejected(world: RankWorld, kind: str, operation: str) -> None:
    answers = world.run(attempt, REFUSED[kind], OPERATIONS[operation])
    assert all(error for error, _ in answers), answers
    assert [after for _, after in answers] == [2.0, 2.0]


@pytest.mark.parametrize("kind", ACCEPTED)
def test_tensor_with_memory_is_summed(world: RankWorld, kind: str) -> None:
    expected = {"no elements": [], "result of a functional collective": [6.0] * 4}.get(kind, [3.0] * 4)
    assert world.run(sums, ACCEPTED[kind]) == [expected] * 2


def expanded(world: Any) -> list[Any]:
    rank = dist.get_rank()
    try:
        dist.all_reduce(torch.ones(1).expand(4))
    except Exception as raised:
        refused = str(raised)
    parts = [torch.zeros(4), torch.zeros(4)]
    dist.all_gather(parts, torch.full((1,), rank + 1.0).expand(4))
    return [refused, *(part.tolist() for part in parts)]


def test_expanded_tensor_can_be_sent_but_not_written(world: RankWorld) -> None:
    for refused, *parts in world.run(expanded):
        assert "Elements of an expanded tensor share memory" in refused
        assert parts == [[1.0] * 4, [2.0] * 4]


def test_what_gloo_does_otherwise_is_documented_and_said_once() -> None:
    command = [sys.executable, "-m", "scripts.gloo_differences", "--check"]
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    said = Counter(re.findall(r"^axon_nb: (.+) works on these ranks, but torchrun's Gloo", done.stderr, re.MULTILINE))
    assert set(said.values()) == {2}, "one line per rank"
    assert {"communication of int16", "AVG of int64", "PREMUL_SUM of float32", "SUM of bool"} <= set(said)
    assert not {"SUM of float32", "SUM of int64", "communication of float32", "AVG of float32"} & set(said)
