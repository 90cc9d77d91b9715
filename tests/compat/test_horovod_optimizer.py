"""The optimizer's checks, state, closures and process sets; BatchNorm over ranks; the timeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from axon_nb.comm import World
from axon_nb.compat import horovod as hvd
from tests.support.training.models import batch, blocks, loss_of

SIZE = 12
"""Samples of a batch, 4 for each rank."""


def test_synchronize_clip_and_step(world: Any) -> None:
    def work(world: World) -> Any:
        hvd.init()
        model = nn.Linear(2, 1)
        nn.init.ones_(model.weight)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
        model(torch.full((1, 2), 3.0 * world.rank())).sum().backward()
        with pytest.raises(AssertionError, match=r"zero_grad\(\) was called after loss.backward\(\) but before"):
            optimizer.zero_grad()
        optimizer.synchronize()
        assert torch.equal(model.weight.grad, torch.full((1, 2), 3.0))  # type: ignore[arg-type]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(AssertionError, match="more than backward_passes_per_step times before call to step"):
            model(torch.ones(1, 2)).sum().backward()
        optimizer.synchronize()
        with pytest.warns(UserWarning, match=r"without optimizer.skip_synchronize\(\) context"):
            optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    answers = world.run(work)
    for weights in answers:
        assert torch.equal(weights[0], answers[0][0])


def test_state_schedulers_closures_and_wrapping_twice(world: Any) -> None:
    def work(world: World) -> Any:
        hvd.init()
        model = blocks(1)
        x, y = (part.chunk(3)[world.rank()] for part in batch(SIZE))
        plain = torch.optim.Adam(model.parameters(), lr=0.1 * (world.rank() + 1))
        if world.rank() == 0:
            loss_of(model(x), y).backward()
            plain.step()
        hvd.broadcast_parameters(list(model.parameters()), root_rank=0)
        hvd.broadcast_optimizer_state(plain, root_rank=0)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())  # a cell that is run again
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
        scheduler.step()
        optimizer.load_state_dict(optimizer.state_dict())
        closure()
        optimizer.step()
        bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer.add_param_group({"params": [bias], "lr": 0.05})
        optimizer.zero_grad()
        ((loss_of(model(x), y) + bias) * (world.rank() + 1)).sum().backward()
        optimizer.step()
        steps = {int(state["step"]) for state in optimizer.state_dict()["state"].values()}
        values = [*(parameter.detach().clone() for parameter in model.parameters()), bias.detach().clone(), bias.grad]
        return values, optimizer.param_groups[0]["lr"], steps

    answers = world.run(work)
    for values, rate, steps in answers:
        assert rate == pytest.approx(0.05)
        assert steps == {4, 1}
        assert values[-1].item() == 2.0
        assert all(torch.equal(value, other) for value, other in zip(values, answers[0][0], strict=True))


def test_an_optimizer_on_a_process_set(world: Any) -> None:
    def work(world: World) -> Any:
        hvd.init()
        pair = hvd.add_process_set([0, 2])
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        plain = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), process_set=pair)
        model(torch.tensor([[float(world.rank() + 1)]])).sum().backward()
        optimizer.step()
        hvd.remove_process_set(pair)
        return model.weight.item()

    assert world.run(work) == [-2.0, -2.0, -2.0]


def test_sync_batch_norm(world: Any) -> None:
    samples = torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(1))

    def work(world: World) -> Any:
        hvd.init()
        norm = hvd.SyncBatchNorm(num_features=4)
        own = samples[2 * world.rank() : 2 * world.rank() + 2].clone().requires_grad_()
        out = norm(own)
        out.pow(3).sum().backward()
        weight = hvd.allreduce(norm.weight.grad, op=hvd.Sum)
        return out.detach(), own.grad, weight, norm.running_mean, norm.running_var

    whole = samples.clone().requires_grad_()
    norm = nn.BatchNorm1d(4)
    out = norm(whole)
    out.pow(3).sum().backward()
    answers = world.run(work)
    for position, expected in enumerate((out.detach(), whole.grad)):
        joined = torch.cat([answer[position] for answer in answers])
        torch.testing.assert_close(joined, expected, rtol=1e-4, atol=1e-5)
    for answer in answers:
        expected_rest = (norm.weight.grad, norm.running_mean, norm.running_var)
        for value, expected in zip(answer[2:], expected_rest, strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)


def test_a_timeline_is_a_trace(world: Any, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"

    def work(world: World) -> None:
        hvd.init()
        if world.rank() == 0:
            hvd.start_timeline(str(path), mark_cycles=True)
        hvd.allreduce(torch.ones(2))
        if world.rank() == 0:
            hvd.stop_timeline()

    world.run(work)
    names = [event["name"] for event in json.loads(path.read_text())["traceEvents"]]
    assert "all_reduce" in names
