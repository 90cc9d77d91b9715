"""Averaging gradients by hand, in buckets, and while backward is running."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from axon_nb import comm
from axon_nb.comm import (
    CommError,
    GradientBucket,
    GradientSynchronizer,
    GradSyncStrategy,
    ProcessGroup,
    TensorError,
    World,
)
from tests.support.training.models import batch, blocks, loss_of

N = 4
SIZES = st.lists(st.integers(0, 7), min_size=1, max_size=8)


@given(sizes=SIZES, capacity=st.integers(1, 10))
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_bucket_returns_its_gradients(sizes: list[int], capacity: int) -> None:
    group = ProcessGroup.mock()
    gradients = [torch.arange(float(size)).view(-1, 1) for size in sizes]
    bucket = GradientBucket(capacity)
    added: list[torch.Tensor] = []
    for gradient in gradients:
        fits = bucket.fits(gradient)
        assert bucket.add(gradient) is (fits or not added)
        if fits or not added:
            added.append(gradient)
    assert bucket.num_elements == sum(gradient.numel() for gradient in added)
    bucket.sync(group=group)
    extracted = bucket.extract()
    assert [part.shape for part in extracted] == [gradient.shape for gradient in added]
    assert all(torch.equal(part, gradient) for part, gradient in zip(extracted, added, strict=True))
    assert bucket.num_gradients == 0


def test_bucket_holds_one_dtype_and_device() -> None:
    bucket = GradientBucket(10)
    bucket.add(torch.ones(2))
    with pytest.raises(TensorError, match="a bucket holds gradients of one dtype and device"):
        bucket.add(torch.ones(2, dtype=torch.float64))
    with pytest.raises(TensorError, match="capacity must be at least 1 element; got 0"):
        GradientBucket(0)


def test_sync_gradients_averages_every_dtype(world: Any) -> None:
    def work(world: World) -> Any:
        rank = float(world.rank())
        gradients = [
            torch.full((3, 2), rank),
            None,
            torch.full((5,), rank, dtype=torch.float64),
            torch.full((1,), 2 * rank),
        ]
        comm.sync_gradients(gradients, bucket_elements=4)
        single = comm.sync_gradient(torch.tensor([rank]))
        return [None if g is None else g.unique().tolist() for g in gradients], single.item()

    assert world.run(work) == [([[1.5], None, [1.5], [3.0]], 1.5)] * N


@pytest.mark.parametrize("strategy", list(GradSyncStrategy))
def test_gradients_of_a_model_equal_those_of_one_process(world: Any, strategy: GradSyncStrategy) -> None:
    def work(world: World) -> Any:
        model = blocks()
        x, y = (part.chunk(N)[world.rank()] for part in batch())
        with GradientSynchronizer(strategy, bucket_size=100).attach(model) as synchronizer:
            for _ in range(2):  # a second step begins with a clean slate
                model.zero_grad()
                loss_of(model(x), y).backward()
                synchronizer.sync_all()
        return [parameter.grad for parameter in model.parameters()]

    model = blocks()
    x, y = batch()
    loss_of(model(x), y).backward()
    for rank, gradients in enumerate(world.run(work)):
        own = blocks()
        loss_of(own(x.chunk(N)[rank]), y.chunk(N)[rank]).backward()
        reference = own if strategy is GradSyncStrategy.NO_SYNC else model
        for gradient, parameter in zip(gradients, reference.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-10, atol=1e-13)


def test_synchronizer_by_hand(world: Any) -> None:
    def work(world: World) -> Any:
        synchronizer = GradientSynchronizer(GradSyncStrategy.SYNCHRONOUS, 3)
        synchronizer.prepare(3)
        gradients = [torch.full((2,), float(world.rank() + index)) for index in range(3)]
        for index, gradient in enumerate(gradients):
            synchronizer.add_gradient(index, gradient)
        with pytest.raises(CommError, match="Parameter 1 has already added its gradient"):
            synchronizer.add_gradient(1, gradients[1])
        with pytest.raises(CommError, match=r"index must be 0 to 2, as prepare\(3\) declared; got 3"):
            synchronizer.add_gradient(3, gradients[1])
        synchronizer.sync_all()
        synchronizer.clear()
        return [gradient.tolist() for gradient in gradients]

    assert world.run(work) == [[[1.5, 1.5], [2.5, 2.5], [3.5, 3.5]]] * N


def test_overlapped_sync_overlaps_backward(world: Any) -> None:
    """Overlapped communication starts before backward ends; synchronous communication does not."""

    def work(world: World) -> dict[str, int]:
        from axon_nb.records.spans import ring  # the ring of the rank's own process

        early = {}
        for strategy in (GradSyncStrategy.OVERLAPPED, GradSyncStrategy.SYNCHRONOUS):
            model = blocks(6, 32)
            x, y = (part.chunk(N)[world.rank()] for part in batch(64, 32))
            with GradientSynchronizer(strategy, bucket_size=1000).attach(model) as synchronizer:
                position = ring.position
                loss_of(model(x), y).backward()
                over_ns = time.monotonic_ns()
                synchronizer.sync_all()
            spans = [
                span for span in ring.since(position)[0] if span.name == "all_reduce" and span.rank == world.rank()
            ]
            early[strategy.value] = sum(span.start_ns < over_ns for span in spans)
            assert len(spans) > 3
        return early

    for early in world.run(work):
        assert early["overlapped"] >= 3
        assert early["synchronous"] == 0
