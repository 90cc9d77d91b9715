"""Checkpoints with different contents per rank: optimizer shards, stages, FSDP over tensor parallelism."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from axon_nb.comm import World
from axon_nb.parallel import DDP, Parallel3D, Pipeline, ZeRO1, declare_placements, make_mesh, parallelize
from axon_nb.parallel.checkpoint import Checkpoints, CheckpointWarning
from tests.parallel.conftest import make
from tests.support.training.models import batch, blocks, loss_of

pytestmark = pytest.mark.timeout(600)

PLAN = {"*.up": "column", "*.down": "row"}


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    """Train on the same batch; return the losses."""
    x, y = batch()
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def alone(folder: Path) -> list[float]:
    """Train two more steps from the checkpoint, in this process."""
    model = blocks()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    with pytest.warns(CheckpointWarning, match="is loaded by 1"):
        Checkpoints(folder).load(2, model=model, optimizer=optimizer)
    return steps(model, optimizer, 2)


def check_moves(process_worlds: Any, work: Any, folder: Path, expected: list[float], *, rel: float) -> None:
    """Train two steps on 4 ranks and save; resume for two more on 2 ranks and in one process."""
    for losses in make("ranks-4", process_worlds).run(work, str(folder), False):
        assert losses == pytest.approx(expected[:2], rel=rel)
    for losses in make("ranks-2", process_worlds).run(work, str(folder), True):
        assert losses == pytest.approx(expected[2:], rel=rel)
    assert alone(folder) == pytest.approx(expected[2:], rel=rel)


@pytest.fixture
def expected() -> list[float]:
    """The losses of four steps in one process."""
    model = blocks()
    return steps(model, torch.optim.AdamW(model.parameters(), lr=0.01), 4)


def test_zero_redundancy_optimizer_shards(process_worlds: Any, tmp_path: Path, expected: list[float]) -> None:
    def work(world: World, folder: str, resume: bool) -> list[float]:
        with warnings.catch_warnings(action="ignore"):
            from torch.distributed.optim import ZeroRedundancyOptimizer

            model = DDP(blocks())
            made: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1.0 if resume else 0.01)
            checkpoints = Checkpoints(folder)
            if resume:
                checkpoints.load(2, model=model, optimizer=made)
                assert made.param_groups[0]["lr"] == 0.01
                return steps(model, made, 2)
            losses = steps(model, made, 2)
            checkpoints.save(2, model=model, optimizer=made)
            return losses

    check_moves(process_worlds, work, tmp_path, expected, rel=1e-12)


def test_fsdp_over_tensor_parallelism(process_worlds: Any, tmp_path: Path, expected: list[float]) -> None:
    def work(world: World, folder: str, resume: bool) -> list[float]:
        mesh = make_mesh(dp=1, tp=2, device="cpu") if world.world_size() == 2 else make_mesh(dp=2, tp=2, device="cpu")
        model = blocks()
        parallelize(model, PLAN, mesh=mesh["tp"])
        for block in model:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        checkpoints = Checkpoints(folder)
        if resume:
            with warnings.catch_warnings(action="ignore"):
                checkpoints.load(2, model=model, optimizer=optimizer)
            return steps(model, optimizer, 2)
        losses = steps(model, optimizer, 2)
        checkpoints.save(2, model=model, optimizer=optimizer)
        return losses

    check_moves(process_worlds, work, tmp_path, expected, rel=1e-10)


def test_ranks_holding_different_stages(two: Any, tmp_path: Path, expected: list[float]) -> None:
    def work(world: World, folder: str) -> Any:
        mine = [str(2 * world.rank()), str(2 * world.rank() + 1)]
        model, trained = blocks(), blocks()
        optimizer = torch.optim.AdamW(trained.parameters(), lr=0.01)
        steps(trained, optimizer, 2)

        def stage(whole: Any) -> nn.ModuleDict:
            return nn.ModuleDict({name: whole[int(name)] for name in mine})

        own = torch.optim.AdamW(stage(trained).parameters(), lr=0.01)
        for parameter in stage(trained).parameters():
            own.state[parameter] = optimizer.state[parameter]
        checkpoints = Checkpoints(folder)
        checkpoints.save(2, model=stage(trained), optimizer=own)
        other = torch.optim.AdamW(stage(model).parameters(), lr=1.0)
        checkpoints.load(2, model=stage(model), optimizer=other)
        pairs = zip(stage(model).parameters(), stage(trained).parameters(), strict=True)
        return other.param_groups[0]["lr"], all(torch.equal(a, b) for a, b in pairs)

    assert two.run(work, str(tmp_path)) == [(0.01, True)] * 2
    assert alone(tmp_path) == pytest.approx(expected[2:], rel=1e-12)


def zero(world: World, train: bool) -> tuple[nn.Module, Any, Any]:
    """ZeRO-1, its optimizer, and a step on the whole batch that gives the loss."""
    model = ZeRO1(blocks())
    optimizer = model.optimizer(torch.optim.AdamW, lr=0.01 if train else 1.0)

    def step() -> float:
        x, y = batch()
        loss = loss_of(model(x), y)
        loss.backward()
        return float(loss)

    return model, optimizer, step


def pipeline(world: World, train: bool) -> tuple[nn.Module, Any, Any]:
    """A pipeline over all ranks."""
    model = Pipeline.split(blocks(), num_microbatches=4, loss=loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 if train else 1.0)
    return model, optimizer, lambda: model.mean_loss(model.step(*batch()))


def three_d(world: World, train: bool) -> tuple[nn.Module, Any, Any]:
    """Two stages, each with FSDP over the remaining ranks."""
    model = Parallel3D(
        blocks(), make_mesh(pp=2, dp=world.world_size() // 2, device="cpu"), num_microbatches=2, loss=loss_of
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 if train else 1.0)

    def step() -> float:
        x, y = map(model.local_batch, batch())
        return model.mean_loss(model.step(x, y))

    return model, optimizer, step


@pytest.mark.parametrize("make_parts", [zero, pipeline, three_d])
def test_our_wrappers_load_on_two_ranks_and_in_one_process(
    process_worlds: Any, tmp_path: Path, expected: list[float], make_parts: Any
) -> None:
    def work(world: World, folder: str, resume: bool) -> list[float]:
        model, optimizer, step = make_parts(world, not resume)
        checkpoints, losses = Checkpoints(folder), []
        if resume:
            checkpoints.load(2, model=model, optimizer=optimizer)
        for _ in range(2):
            optimizer.zero_grad()
            losses.append(step())
            optimizer.step()
        if not resume:
            checkpoints.save(2, model=model, optimizer=optimizer)
        return losses

    check_moves(process_worlds, work, tmp_path, expected, rel=1e-10)


class HandSharded(nn.Module):
    """A linear layer of which each rank holds some columns, in plain tensors; 7 of them do not divide evenly."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self._group = None if mesh is None else mesh.get_group()
        whole = torch.randn(3, 7, dtype=torch.float64)
        if mesh is None:
            self.weight = nn.Parameter(whole)
            self.register_buffer("scale", torch.arange(1.0, 8.0))
            return
        self._rank, size = mesh.get_local_rank(), mesh.size()
        weight = nn.Parameter(whole.chunk(size, 1)[self._rank].clone())
        self.weight = declare_placements(weight, mesh, [Shard(1)], shape=(3, 7))
        self.register_buffer("scale", torch.arange(1.0, 8.0).chunk(size)[self._rank].clone())
        declare_placements(self.scale, mesh, [Shard(0)], shape=(7,))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._group is not None:
            x = x.split(-(-7 // dist.get_world_size(self._group)), 1)[self._rank]
        y = (x * self.scale) @ self.weight.T
        if self._group is None:
            return y
        total = y.detach().clone()
        dist.all_reduce(total, group=self._group)
        return y + (total - y.detach())  # the sum, with the gradient of this rank's part


def test_plain_tensors_with_declared_placements(process_worlds: Any, tmp_path: Path) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        x = torch.linspace(-1, 1, 14, dtype=torch.float64).view(2, 7)
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    def work(world: World, folder: str, resume: bool) -> list[float]:
        with warnings.catch_warnings(action="ignore"):
            model = HandSharded(make_mesh(tp=world.world_size(), device="cpu")["tp"])
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            if resume:
                with torch.no_grad():
                    model.weight.zero_()
                    model.scale.zero_()
                Checkpoints(folder).load(2, model=model, optimizer=optimizer)
                return train(model, optimizer)
            losses = train(model, optimizer)
            Checkpoints(folder).save(2, model=model, optimizer=optimizer)
            return losses

    whole = HandSharded(None)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.1)
    expected = train(whole, optimizer) + train(whole, optimizer)
    for losses in make("ranks-2", process_worlds).run(work, str(tmp_path), False):
        assert losses == pytest.approx(expected[:2], rel=1e-12)
    for losses in make("ranks-4", process_worlds).run(work, str(tmp_path), True):
        assert losses == pytest.approx(expected[2:], rel=1e-12)
    again = HandSharded(None)
    optimizer = torch.optim.AdamW(again.parameters(), lr=1.0)
    with pytest.warns(CheckpointWarning, match="is loaded by 1"):
        Checkpoints(tmp_path).load(2, model=again, optimizer=optimizer)
    assert train(again, optimizer) == pytest.approx(expected[2:], rel=1e-12)
