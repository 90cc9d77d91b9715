"""Communication overlaps backward and runs once per optimizer step, as the recorded spans show."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from axon_nb.comm import GradSyncStrategy, World
from axon_nb.parallel import BF16, DDP, accumulating
from tests.support.training.models import batch, blocks, loss_of


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
