"""Training with DistributedOptimizer: weights equal on all ranks, and those of one process on the whole batch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from axon_nb.comm import World
from axon_nb.compat import horovod as hvd
from tests.support.training.models import batch, blocks, loss_of

SIZE = 12
"""Samples of a batch, 4 for each rank."""

Make = Callable[[nn.Module], torch.optim.Optimizer]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """With momentum."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """With weight decay."""
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def trained(model: nn.Module, optimizer: Any, own: slice, *, steps: int = 3, pieces: int = 1) -> list[torch.Tensor]:
    """The parameters after some steps on a part of each batch, in so many pieces."""
    x, y = (part[own] for part in batch(SIZE))
    for step in range(steps):
        optimizer.zero_grad()
        for inputs, targets in zip(x.chunk(pieces), y.chunk(pieces), strict=True):
            (loss_of(model(inputs * (step + 1)), targets) / pieces).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


class Halves(hvd.Compressor):
    """A user's compressor: gradients travel as float32."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """In float32."""
        return tensor.float(), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """As it was."""
        return tensor.to(ctx)


OPTIONS: dict[str, tuple[Make, dict[str, Any], float]] = {
    "sgd": (sgd, {}, 1e-12),
    "adam": (adam, {}, 1e-9),
    "sum": (sgd, {"op": hvd.Sum}, 1e-12),
    "predivided": (sgd, {"gradient_predivide_factor": 4.0}, 1e-12),
    "three groups": (sgd, {"groups": 3}, 1e-12),
    "listed groups": (sgd, {"groups": "first and last"}, 1e-12),
    "passes": (sgd, {"backward_passes_per_step": 2}, 1e-12),
    "fp16": (sgd, {"compression": hvd.Compression.fp16}, 5e-3),
    "own compressor": (sgd, {"compression": Halves}, 1e-5),
    "no names": (sgd, {"named_parameters": None}, 1e-12),
}


@pytest.mark.parametrize("what", OPTIONS)
def test_ranks_train_as_one_process(world: Any, what: str) -> None:
    make, given, tolerance = OPTIONS[what]
    pieces = given.get("backward_passes_per_step", 1)

    def work(world: World) -> Any:
        hvd.init()
        torch.manual_seed(world.rank())
        model = blocks()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)  # another start on each rank
        hvd.broadcast_parameters(model.state_dict(), root_rank=1)
        options = {"named_parameters": model.named_parameters(), **given}
        if options.get("groups") == "first and last":
            every = list(model.parameters())
            options["groups"] = [every[:2], every[-2:]]
        plain = make(model)
        if given.get("op") == hvd.Sum:
            plain.param_groups[0]["lr"] /= hvd.size()
        optimizer = hvd.DistributedOptimizer(plain, **options)
        assert isinstance(optimizer, type(plain))
        start = [parameter.detach().clone() for parameter in model.parameters()]
        own = slice(4 * world.rank(), 4 * world.rank() + 4)
        return start, trained(model, optimizer, own, pieces=pieces)

    answers = world.run(work)
    reference = blocks()
    with torch.no_grad():
        for parameter, value in zip(reference.parameters(), answers[0][0], strict=True):
            parameter.copy_(value)
    expected = trained(reference, make(reference), slice(None))
    for start, weights in answers:
        for index, value in enumerate(weights):
            assert torch.equal(start[index], answers[0][0][index])
            assert torch.equal(value, answers[0][1][index])
            torch.testing.assert_close(value, expected[index], rtol=tolerance, atol=tolerance)


def test_reductions_begin_during_backward(world: Any) -> None:
    def work(world: World) -> Any:
        from axon_nb.records.spans import ring  # the ring of the rank's own process

        hvd.init()
        model = blocks(6, 32)
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        x, y = (part.chunk(3)[world.rank()] for part in batch(SIZE, 32))
        ready: list[int] = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: ready.append(time.monotonic_ns()))
        position = ring.position
        loss_of(model(x), y).backward()
        optimizer.step()
        spans = [span for span in ring.since(position)[0] if span.name == "all_reduce" and span.rank == world.rank()]
        return len(spans), sum(span.start_ns < max(ready) for span in spans)

    for count, early in world.run(work):
        assert count == 24
        assert early >= 18, f"{early} of {count} reductions began before the last gradient was there"


def test_ranks_whose_graphs_differ(world: Any) -> None:
    """As in Horovod, gradients that a rank has not made count as zeros, and the order does not matter."""

    def work(world: World) -> Any:
        hvd.init()
        with torch.random.fork_rng():
            torch.manual_seed(4)
            layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        optimizer = hvd.DistributedOptimizer(sgd(layers), layers.named_parameters())
        x = torch.ones(2, 4)
        used = [layers[0], layers[2]] if world.rank() == 0 else [layers[2], layers[1]]
        for _ in range(2):
            optimizer.zero_grad()
            out = x
            for layer in used:
                out = layer(out)
            out.sum().backward()
            optimizer.step()
        return [parameter.detach().clone() for parameter in layers.parameters()]

    answers = world.run(work)
    for weights in answers:
        assert all(torch.equal(value, other) for value, other in zip(weights, answers[0], strict=True))


@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients(world: Any, as_dense: bool) -> None:
    def work(world: World) -> Any:
        hvd.init()
        with torch.random.fork_rng():
            torch.manual_seed(4)
            model = nn.Embedding(10, 3, sparse=True)
        optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), sparse_as_dense=as_dense)
        words = torch.tensor([[1, 2, 4], [4, 3, 2], [1, 3, 9]][world.rank()])
        for _ in range(2):
            optimizer.zero_grad()
            model(words).square().sum().backward()
            optimizer.step()
        return model.weight.detach().clone()

    with torch.random.fork_rng():
        torch.manual_seed(4)
        reference = nn.Embedding(10, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(list(reference.parameters()), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (reference(torch.tensor([1, 2, 4, 4, 3, 2, 1, 3, 9])).square().sum() / 3).backward()
        optimizer.step()
    for weight in world.run(work):
        torch.testing.assert_close(weight, reference.weight.detach(), rtol=1e-5, atol=1e-6)
