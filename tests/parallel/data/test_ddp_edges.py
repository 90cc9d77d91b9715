"""Rare and error-prone uses of DDP: right gradients or a clear error; and what overlaps with backward."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from axon_nb.comm import GradSyncStrategy, NotInGroupError, ProcessGroup, TensorError, TensorMismatchError, World
from axon_nb.errors import UsageError
from axon_nb.parallel import BF16, DDP, FP16, TopK, accumulating
from tests.support.training.models import batch, blocks, loss_of

NO_SYNC = GradSyncStrategy.NO_SYNC


def linear() -> nn.Linear:
    """Two weights, no bias."""
    return nn.Linear(2, 1, bias=False)


def ones(world: World) -> torch.Tensor:
    """A batch of one sample, larger on higher ranks: gradients of its sum are 1 on rank 0 and 2 on rank 1."""
    return torch.full((1, 2), world.rank() + 1.0)


class Branches(nn.Module):
    """Uses one of two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.never = (nn.Linear(1, 1, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor, second: bool) -> torch.Tensor:
        """`second` chooses the weight."""
        out: torch.Tensor = (self.b if second else self.a)(x)
        return out


def test_forward_without_backward_averages_nothing(two: Any) -> None:
    """Accumulate gradients, compute a validation loss, then average."""

    def work(world: World) -> Any:
        model = DDP(linear())
        with model.no_sync():
            model(ones(world)).sum().backward()
        model(ones(world))
        model.sync_gradients()
        return model.module.weight.grad

    for gradient in two.run(work):
        assert gradient.tolist() == [[1.5, 1.5]]


def test_automatic_averaging_after_accumulation_is_detected(two: Any) -> None:
    def work(world: World) -> Any:
        model = DDP(linear())
        with model.no_sync():
            model(ones(world)).sum().backward()
        model({"x": ones(world)}["x"]).sum().backward()
        before = model.module.weight.grad.clone()
        model.sync_gradients()
        return before, model.module.weight.grad

    for before, after in two.run(work):
        assert before.tolist() == after.tolist() == [[3.0, 3.0]]


@pytest.mark.parametrize("strategy", [GradSyncStrategy.OVERLAPPED, NO_SYNC])
def test_parameters_that_some_ranks_do_not_use(two: Any, strategy: GradSyncStrategy) -> None:
    def work(world: World) -> Any:
        model = DDP(Branches(), strategy=strategy, find_unused_parameters=True)
        model(torch.ones(1, 1), world.rank() == 1).sum().backward()
        model.sync_gradients()
        return [None if p.grad is None else p.grad.item() for p in model.parameters()]

    assert two.run(work) == [[0.5, 0.5, None]] * 2


def test_sparse_gradients(two: Any) -> None:
    def work(world: World) -> Any:
        table = nn.Embedding(3, 1, sparse=True)
        model = DDP(table)
        model(torch.tensor([world.rank()])).sum().backward()
        assert table.weight.grad is not None
        return table.weight.grad.to_dense().flatten().tolist()

    assert two.run(work) == [[0.5, 0.5, 0.0]] * 2


def test_copies_train_like_the_original(two: Any) -> None:
    def work(world: World) -> Any:
        original = DDP(linear(), strategy=GradSyncStrategy.SYNCHRONOUS)
        gradients = []
        for model in (original, copy.deepcopy(original), pickle.loads(pickle.dumps(original))):
            model(ones(world)).sum().backward()
            model.sync_gradients()
            gradients.append(model.module.weight.grad.tolist())
            assert model.group.ranks == (0, 1)
            assert model.strategy is GradSyncStrategy.SYNCHRONOUS
        return gradients

    assert two.run(work) == [[[[1.5, 1.5]]] * 3] * 2


def test_copies_have_their_own_hooks(two: Any) -> None:
    def work(world: World) -> Any:
        original: Any = DDP(linear())
        hooks = [original.register_hook(TopK(0.5))]
        for _ in range(2):
            original(ones(world)).sum().backward()
        models = [copy.deepcopy(original), pickle.loads(pickle.dumps(original))]
        for model in models:
            hooks.append(model._comm_hooks[0][1])
            model.zero_grad()
            model(ones(world)).sum().backward()
        sent = [hook.stats.buckets for hook in hooks]
        return sent, [model.module.weight.grad.tolist() for model in models], len(set(map(id, hooks)))

    for sent, (one, other), count in two.run(work):
        assert sent == [2, 3, 3]
        assert sum(one[0]) == 1.5
        assert one == other
        assert count == 3


def test_every_kind_of_group(four: Any) -> None:
    def work(world: World) -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
        seen = []
        for keywords in (
            {"group": mesh["local"]},
            {"group": mesh.get_group("local")},
            {"process_group": mesh.get_group("local"), "bucket_cap_mb": 1},
            {"group": world},
        ):
            model = DDP(linear(), **keywords)
            model(ones(world)).sum().backward()
            seen.append(model.module.weight.grad[0, 0].item())
        with pytest.raises(UsageError, match=r"several axes \(node, local\); pass one of them, such as mesh\['node'\]"):
            DDP(linear(), mesh)
        return seen

    assert four.run(work) == [[1.5, 1.5, 1.5, 2.5]] * 2 + [[3.5, 3.5, 3.5, 2.5]] * 2


def test_non_member_placeholder_of_torch(two: Any) -> None:
    def work(world: World) -> str:
        group: Any = dist.new_group([0])
        try:
            DDP(linear(), group)
        except NotInGroupError as error:
            return str(error)
        return ""

    answers = two.run(work)
    assert answers[0] == ""
    assert "This rank is not a member of the group" in answers[1]


def _frozen(world: World) -> nn.Module:
    return linear().requires_grad_(world.rank() == 0)


def _with_buffer(world: World) -> nn.Module:
    model = linear()
    model.register_buffer("mean", torch.zeros(world.rank() + 1))
    return model


def _longer(world: World) -> nn.Module:
    return nn.Sequential(*(linear() for _ in range(1 + world.rank())))


ONE_SIDED: list[tuple[Callable[[World], nn.Module], type[UsageError], str]] = [
    (_frozen, UsageError, "Linear has no parameter that requires a gradient"),
    (
        lambda w: nn.Linear(2, 1, device="meta" if w.rank() else None),
        TensorError,
        "are on the meta device and have no data",
    ),
    (
        lambda w: nn.LazyLinear(1) if w.rank() else nn.Linear(2, 1),
        TensorError,
        "weight is lazy and has no shape yet; run the model",
    ),
    (_with_buffer, TensorMismatchError, r"rank 0 has mean of torch.float32 \(1,\), a buffer, rank 1 has mean of"),
    (_longer, TensorMismatchError, "rank 0 has 1 parameters and buffers, rank 1 has 2. Build the same model"),
    (
        lambda w: nn.Linear(4, 2 + w.rank()),
        TensorMismatchError,
        r"rank 0 has weight of torch.float32 \(2, 4\), rank 1 has weight of torch.float32 \(3, 4\)",
    ),
    (
        lambda w: linear().to([torch.float32, torch.float64][w.rank()]),
        TensorMismatchError,
        "rank 1 has weight of torch.float64",
    ),
]


@pytest.mark.parametrize(
    ("make", "kind", "text"), ONE_SIDED, ids=["frozen", "meta", "lazy", "buffer", "long", "shape", "dtype"]
)
def test_error_on_one_rank_raises_on_all(
    two: Any, make: Callable[[World], nn.Module], kind: type[UsageError], text: str
) -> None:
    def work(world: World) -> float:
        with pytest.raises(kind, match=text):
            DDP(make(world))
        return float(_sum(world))  # and nobody waits: the next call works

    assert two.run(work) == [3.0, 3.0]


def _sum(world: World) -> torch.Tensor:
    total = ones(world)[0, 0]
    dist.all_reduce(total)
    return total


def test_ignored_parameters(two: Any) -> None:
    def work(world: World) -> Any:
        model: Any = nn.ModuleDict({"shared": linear(), "own": nn.Linear(1 + world.rank(), 1)})
        model.forward = model["shared"].forward
        DDP._set_params_and_buffers_to_ignore_for_model(model, ["own.weight", "own.bias"])
        wrapped = DDP(model, strategy=NO_SYNC)
        wrapped(ones(world)).sum().backward()
        wrapped.sync_gradients()
        wrapped.sync_parameters()
        return model["shared"].weight.grad.tolist()

    assert two.run(work) == [[[1.5, 1.5]]] * 2


def test_invalid_arguments_raise() -> None:
    group = ProcessGroup.mock()
    for given in ([0], 0, "gloo"):
        with pytest.raises(UsageError, match="group must be a ProcessGroup, a World, a mesh with one axis"):
            DDP(linear(), given)
    with pytest.raises(UsageError, match=r"strategy must be one of GradSyncStrategy\.SYNCHRONOUS, "):
        DDP(linear(), group, strategy="sometimes")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="use a strategy other than NO_SYNC"):
        DDP(linear(), group, strategy=NO_SYNC).join()
    with pytest.raises(UsageError, match="use a strategy other than NO_SYNC"):
        DDP(linear(), group, strategy=NO_SYNC).register_hook(FP16())
    model = DDP(linear(), group)
    with pytest.raises(UsageError, match=r"hook must be one of axon_nb\.parallel's, such as FP16\(\)"):
        model.register_hook(lambda bucket: bucket)  # type: ignore[arg-type]
    for size in ("big", 0):
        with pytest.raises(UsageError, match=f"bucket_size_mb must be a positive number of MiB; got {size!r}"):
            DDP(linear(), group, bucket_size_mb=size)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="Create an instance first"):
        DDP(nn.Linear, group)  # type: ignore[arg-type]
    hook = model.register_hook(FP16())
    with pytest.raises(UsageError, match="This model already has a hook"):
        model.register_hook(TopK())
    with pytest.raises(UsageError, match="This FP16 belongs to another model"):
        DDP(linear(), group).register_hook(hook)


def test_uneven_batches_with_join_train_as_one_process(two: Any) -> None:
    """Rank 0 has one batch, rank 1 has three: missing batches count as zero, and the final weights agree."""

    def work(world: World) -> Any:
        model = DDP(blocks())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = batch(12)
        own = [[slice(0, 3)], [slice(6, 9), slice(3, 6), slice(6, 9)]]
        with model.join():
            for rows in own[world.rank()]:
                optimizer.zero_grad()
                loss_of(model(x[rows]), y[rows]).backward()
                optimizer.step()
        return [p.detach() for p in model.parameters()]

    model = blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = batch(12)
    for rows in ([slice(0, 3), slice(6, 9)], [slice(3, 6)], [slice(6, 9)]):
        optimizer.zero_grad()
        for own in rows:
            (loss_of(model(x[own]), y[own]) / 2).backward()
        optimizer.step()
    first, second = two.run(work)
    for weight, same, reference in zip(first, second, model.parameters(), strict=True):
        assert torch.equal(weight, same), "rank 0 got the last weights, too"
        torch.testing.assert_close(weight, reference.detach(), rtol=1e-10, atol=1e-12)


def test_state_dicts_match_torch(two: Any) -> None:
    def work(world: World) -> Any:
        model = DDP(linear())
        assert model.train() is model.eval() is model
        return sorted(model.state_dict()), sorted(model.module.state_dict())

    assert two.run(work) == [(["module.weight"], ["weight"])] * 2


@pytest.mark.parametrize("strategy", [GradSyncStrategy.OVERLAPPED, GradSyncStrategy.SYNCHRONOUS])
def test_buckets_are_sent_during_backward(two: Any, strategy: GradSyncStrategy) -> None:
    def work(world: World) -> Any:
        from axon_nb.records.spans import ring  # the ring of the rank's own process

        model = DDP(blocks(6, 32), bucket_size_mb=0.01, strategy=strategy)
        hook = model.register_hook(BF16())
        x, y = (part.chunk(2)[world.rank()] for part in batch(64, 32))
        loss_of(model(x), y).backward()  # torch rebuilds its buckets after the first step
        model.zero_grad()
        ready: list[int] = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: ready.append(time.monotonic_ns()))
        position, sent = ring.position, hook.stats.bytes_sent
        loss_of(model(x), y).backward()
        spans = [span for span in ring.since(position)[0] if span.name == "BF16" and span.rank == world.rank()]
        early = sum(span.start_ns < max(ready) for span in spans)
        return len(spans), early, sum(span.bytes for span in spans) == hook.stats.bytes_sent - sent

    for count, early, bytes_match in two.run(work):
        assert bytes_match
        if strategy is GradSyncStrategy.OVERLAPPED:
            assert early >= 3, f"{early} of {count} buckets began before the last gradient was there"
        else:
            assert (count, early) == (1, 0)


def test_accumulation_sends_the_gradients_once_per_step(two: Any) -> None:
    def work(world: World) -> Any:
        model = DDP(blocks(), strategy=GradSyncStrategy.SYNCHRONOUS)
        hook = model.register_hook(BF16())
        x, y = (part.chunk(2)[world.rank()] for part in batch(20))
        seen = []
        for step in range(5):
            with accumulating(model, step, 2, total=5) as last:
                loss_of(model(x[2 * step : 2 * step + 2]), y[2 * step : 2 * step + 2]).backward()
            seen.append((last, hook.stats.buckets))
            if last:
                model.zero_grad()
        elements = sum(p.numel() for p in model.parameters())
        return seen, hook.stats.bytes_sent == 3 * 2 * elements

    expected = [(False, 0), (True, 1), (False, 1), (True, 2), (True, 3)]  # what is left over ends an update as well
    assert two.run(work) == [(expected, True)] * 2


def test_remaining_micro_batches_complete_a_step(two: Any) -> None:
    def work(world: World) -> list[float]:
        model = DDP(torch.nn.Linear(1, 1, bias=False))
        gradients = []
        for _ in range(2):
            for step in range(3):
                with accumulating(model, step, 2, total=3) as last:
                    model(torch.ones(1, 1)).sum().backward()
                if last:
                    gradients.append(model.module.weight.grad.item())
                    model.zero_grad()
        return gradients

    assert two.run(work) == [[2.0, 1.0, 2.0, 1.0]] * 2
