"""Checkpoints on real ranks round-trip, for any number of ranks and layout; loading runs nothing of theirs."""

from __future__ import annotations

import os
import pickle
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from axon_nb.comm import ProcessGroup, World
from axon_nb.parallel import DDP, FSDP, TensorParallelBlock
from axon_nb.parallel.checkpoint import (
    CheckpointNotFoundError,
    Checkpoints,
    CheckpointWarning,
    CorruptCheckpointError,
    ResumableSampler,
)
from axon_nb.parallel.checkpoint.checkpoints import read_metadata
from tests.parallel.conftest import make
from tests.support.training.models import blocks, loss_of

DATA = TensorDataset(torch.randn(48, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64))


@pytest.fixture
def real_two(process_worlds: Any) -> Any:
    """Two processes."""
    return make("ranks-2", process_worlds)


@pytest.fixture
def real_four(process_worlds: Any) -> Any:
    """Four processes."""
    return make("ranks-4", process_worlds)


def whole(value: Any) -> torch.Tensor:
    """Return a full copy of a tensor."""
    tensor: torch.Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return tensor.detach().clone()


def wrapped(kind: str) -> nn.Module:
    """Return the test model, as plain, ddp or fsdp."""
    model = blocks()
    return {"plain": lambda: model, "ddp": lambda: DDP(model), "fsdp": lambda: FSDP(model)}[kind]()


def states(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return all parameters and optimizer states in full."""
    plain = getattr(model, "module", model)
    found = {}
    for name, parameter in plain.named_parameters():
        found[name] = whole(parameter)
        for key, value in optimizer.state[parameter].items():
            found[f"{name}: {key}"] = whole(value)
    return found


def train(world: Any, folder: str, kind: str, *, until: int, save_at: int | None = None, resume: bool = False) -> Any:
    """Train with a sampler, a scheduler and random noise; return losses, states and what was resumed."""
    rank = world.rank() if world else 0
    torch.manual_seed(10 + rank)
    random.seed(20 + rank)
    np.random.seed(30 + rank)
    model = wrapped(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    sampler = ResumableSampler(DATA) if world else None
    objects: dict[str, Any] = {"schedule": schedule, "sampler": sampler} if world else {"schedule": schedule}
    checkpoints = Checkpoints(folder)
    resumed = checkpoints.load_latest(model=model, optimizer=optimizer, **objects) if resume else None
    losses: list[float] = []
    step = resumed.step + 1 if resumed else 0
    epoch = sampler.epoch if sampler else 0
    while sampler and step < until:
        sampler.set_epoch(epoch)
        for (x,) in DataLoader(DATA, batch_size=8, sampler=sampler, generator=torch.Generator()):
            if step == until:
                break
            noise = torch.randn_like(x) + random.random() + float(np.random.rand())
            optimizer.zero_grad()
            loss = loss_of(model(x + 0.1 * noise), x)
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            if step == save_at:
                checkpoints.save(step, model=model, optimizer=optimizer, extra={"rank": rank}, **objects)
            step += 1
        epoch += 1
    return losses, states(model, optimizer), resumed and (resumed.step, resumed.extra)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_resumed_run_is_bitwise_identical(real_two: Any, tmp_path: Path, kind: str) -> None:
    # Three batches an epoch and rank: step 4 is within the second one.
    full = real_two.run(train, str(tmp_path), kind, until=9, save_at=4)
    again = real_two.run(train, str(tmp_path), kind, until=9, resume=True)
    for rank, ((losses, after, _), (resumed_losses, resumed_after, resumed)) in enumerate(
        zip(full, again, strict=True)
    ):
        assert resumed == (4, {"rank": rank})
        assert resumed_losses == losses[5:]
        assert after.keys() == resumed_after.keys()
        assert all(torch.equal(value, resumed_after[name]) for name, value in after.items())


def test_checkpoint_of_four_ranks_loads_on_two_and_one(real_four: Any, real_two: Any, tmp_path: Path) -> None:
    folder = str(tmp_path)
    saved = real_four.run(train, folder, "fsdp", until=3, save_at=2)[0][1]

    def load(world: Any, kind: str) -> Any:
        with warnings.catch_warnings(record=True) as reported:
            warnings.simplefilter("always")
            _, found, resumed = train(world, folder, kind, until=0, resume=True)
        return found, resumed, [str(warning.message) for warning in reported]

    for world, kinds in ((real_two, ("ddp", "fsdp")), (None, ("plain",))):
        for kind in kinds:
            for rank, (found, resumed, reported) in enumerate(world.run(load, kind) if world else [load(None, kind)]):
                assert resumed == (2, {"rank": 0})
                assert found.keys() == saved.keys()
                assert all(torch.equal(value, saved[name]) for name, value in found.items())
                assert bool(reported) == (rank == 0)
                assert all("saved by 4 ranks and is loaded by" in text for text in reported)


def test_shards_of_tensor_parallel_layers_are_saved_as_shards(four: Any, tmp_path: Path) -> None:
    f64: dict[str, Any] = {"dtype": torch.float64}
    x = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(2), **f64)

    def step(block: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (block(x) - x.flip(0)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def work(world: World, folder: str) -> Any:
        torch.manual_seed(world.rank())
        block = TensorParallelBlock(16, 4, **f64)
        optimizer = torch.optim.AdamW(block.parameters(), lr=0.1)
        step(block, optimizer)
        Checkpoints(folder).save(0, model=block, optimizer=optimizer)
        return step(block, optimizer), step(block, optimizer)

    def again(world: World, folder: str) -> Any:
        block = TensorParallelBlock(16, 4, **f64)
        optimizer = torch.optim.AdamW(block.parameters(), lr=1.0)
        Checkpoints(folder).load(0, model=block, optimizer=optimizer)
        return step(block, optimizer), step(block, optimizer)

    losses = four.run(work, str(tmp_path))
    for (first, second), (first_again, second_again) in zip(losses, four.run(again, str(tmp_path)), strict=True):
        assert torch.equal(first, first_again)
        assert torch.equal(second, second_again)
    block = TensorParallelBlock(16, 4, group=ProcessGroup.mock(), **f64)
    optimizer = torch.optim.AdamW(block.parameters(), lr=1.0)
    with pytest.warns(CheckpointWarning, match="saved by 4 ranks and is loaded by 1"):
        Checkpoints(tmp_path).load(0, model=block, optimizer=optimizer)
    torch.testing.assert_close((step(block, optimizer), step(block, optimizer)), losses[0], rtol=1e-12, atol=0)


def test_retention_keeps_the_most_recent_saves(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.latest is None
    assert checkpoints.load_latest(model=model) is None
    left = tmp_path / ".saving_by_a_run_that_was_killed"
    left.mkdir()
    for step in (10, 20, 30, 15, 15):
        with torch.no_grad():
            model.weight.fill_(step)
        made = checkpoints.save(step, model=model)
        assert made.is_dir()
    assert not left.exists()
    assert checkpoints.steps() == [30, 15]
    assert sorted(item.name for item in tmp_path.iterdir()) == ["step_00000015.1", "step_00000030"]
    assert checkpoints.latest == 15
    resumed = checkpoints.load_latest(model=model)
    assert resumed is not None
    assert resumed.step == 15
    assert checkpoints.path(15) == resumed.path == made
    assert float(model.weight.detach().mean()) == 15
    with pytest.raises(CheckpointNotFoundError, match=r"no checkpoint of step 20; available: 15, 30\."):
        checkpoints.load(20, model=model)
    assert repr(checkpoints) == f"Checkpoints('{tmp_path}', steps=[30, 15])"


def test_sampler_resumes_within_its_epoch_on_another_world_size() -> None:
    data = TensorDataset(torch.arange(24))

    def samplers(ranks: int) -> list[ResumableSampler]:
        return [ResumableSampler(data, num_replicas=ranks, rank=rank, seed=3) for rank in range(ranks)]

    four, seen = samplers(4), []
    for sampler in four:
        sampler.set_epoch(2)
    streams = [iter(sampler) for sampler in four]
    seen = [next(stream) for _ in range(3) for stream in streams]
    assert four[0].state_dict() == {"epoch": 2, "position": 12}
    for sampler in (two := samplers(2)):
        sampler.load_state_dict(four[0].state_dict())
        assert len(sampler) == 6
        sampler.set_epoch(2)
    rest = [index for pair in zip(*two, strict=True) for index in pair]
    assert sorted(seen + rest) == list(range(24))
    (alone,) = samplers(1)
    alone.set_epoch(2)
    assert seen + rest == list(alone)
    over = samplers(2)[0]
    over.load_state_dict(two[0].state_dict())
    assert len(over) == len(list(over)) == 0
    assert len(over) == len(list(over)) == 12


@pytest.mark.parametrize("kind", ["SGD", "Adam, amsgrad", "Adagrad", "LBFGS", "two", "Adam, tensor lr"])
def test_every_optimizer_resumes_bitwise_identical(tmp_path: Path, kind: str) -> None:
    def build() -> tuple[nn.Module, Any]:
        model: Any = blocks()
        model[3].up.weight = model[0].up.weight  # one parameter under two names
        model[1].down.weight.requires_grad_(False)
        own = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return model, {
            "SGD": lambda: torch.optim.SGD(own, lr=0.1, momentum=0.9, dampening=0.5),
            "Adam, amsgrad": lambda: torch.optim.Adam(own, lr=0.01, amsgrad=True),
            "Adagrad": lambda: torch.optim.Adagrad(own, lr=0.1),
            "LBFGS": lambda: torch.optim.LBFGS(own, lr=0.1, max_iter=3),
            "two": lambda: (
                torch.optim.AdamW([{"params": own[:2]}, {"params": own[2:4], "lr": 0.5}], lr=0.01),
                torch.optim.SGD(own[4:], lr=0.1, momentum=0.9),
            ),
            "Adam, tensor lr": lambda: torch.optim.Adam(own, lr=torch.tensor(0.01)),
        }[kind]()

    def steps(model: nn.Module, optimizers: Any) -> list[float]:
        x, losses = next(iter(DataLoader(DATA, batch_size=8, generator=torch.Generator())))[0], []
        for _ in range(3):
            for optimizer in optimizers if isinstance(optimizers, tuple) else (optimizers,):

                def closure(optimizer: Any = optimizer) -> torch.Tensor:
                    optimizer.zero_grad()
                    loss = loss_of(model(x), x.flip(0))
                    loss.backward()
                    losses.append(loss.item())
                    return loss

                optimizer.step(closure)
        return losses

    checkpoints = Checkpoints(tmp_path, keep=None)
    model, optimizers = build()
    checkpoints.save(0, model=model, optimizer=optimizers)
    first = steps(model, optimizers)
    checkpoints.save(3, model=model, optimizer=optimizers)
    second = steps(model, optimizers)
    for step, expected in ((3, second), (0, first)):
        model, optimizers = build()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        checkpoints.load(step, model=model, optimizer=optimizers)
        assert steps(model, optimizers) == expected


class Call:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


def test_metadata_match_those_torch_reads(tmp_path: Path) -> None:
    dtypes = [value for value in vars(torch).values() if isinstance(value, torch.dtype) and value.itemsize]
    plain = [dtype for dtype in dtypes if dtype.is_floating_point or dtype in (torch.int8, torch.int64, torch.bool)]
    state: dict[str, Any] = {str(dtype): torch.zeros(2, 3).to(dtype) for dtype in plain if dtype.itemsize in (2, 4, 8)}
    state |= {"strided": torch.ones(4, 4).t(), "nested": {"list": [torch.ones(1)], "text": "x"}, "step": 3}
    with warnings.catch_warnings(action="ignore"):  # torch says that it saves in one process
        save(state, checkpoint_id=tmp_path, no_dist=True)
    found, expected = read_metadata(tmp_path), FileSystemReader(tmp_path).read_metadata()
    assert found.state_dict_metadata == expected.state_dict_metadata
    assert found.storage_data == expected.storage_data
    assert found.planner_data == expected.planner_data


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (os.system, f"{os.system.__module__}.system"),
        (eval, "builtins.eval"),
        (getattr, "builtins.getattr"),
        (torch.load, "torch.serialization.load"),
    ],
)
def test_code_in_a_checkpoint_is_rejected_and_not_run(tmp_path: Path, function: Any, name: str) -> None:
    checkpoints = Checkpoints(tmp_path)

    def work(world: World) -> None:
        checkpoints.save(1, model=nn.Linear(2, 2))

    World.mock(1).run(work)
    mark = tmp_path / "ran"
    arguments = ["text", "upper"] if function is getattr else [f"open({str(mark)!r}, 'w')"]
    if function is os.system:
        arguments = [f"touch {mark}"]
    index = next(tmp_path.glob("step_*")) / ".metadata"
    size = index.stat().st_size
    index.write_bytes(pickle.dumps(Call(function, *arguments)).ljust(size, b"."))

    def load(world: World) -> None:
        Checkpoints(tmp_path).load_latest(model=nn.Linear(2, 2))

    with pytest.raises(CorruptCheckpointError, match=f"refers to {name}, which the index"):
        World.mock(1).run(load)
    assert not mark.exists()


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps([1])])
def test_invalid_index_is_rejected(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=r"\.metadata (is damaged|holds an object of type list)"):
        read_metadata(tmp_path)
