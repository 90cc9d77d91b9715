"""Helpers of the training loop: correct means, atomic checkpoints, accumulation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from axon_nb.comm import CommError, ProcessGroup, World
from axon_nb.errors import UsageError
from axon_nb.parallel import DDP, accumulating, load_checkpoint, reduce_metrics, save_on_main
from tests.support.training.models import batch, blocks, loss_of


def test_metrics_are_means_over_samples_not_over_ranks(two: Any) -> None:
    def work(world: World) -> Any:
        values = torch.arange(3.0) if world.rank() == 0 else torch.tensor([9.0])
        mine: dict[str, float | torch.Tensor] = {"loss": values.mean(), "hits": (values > 1).double().mean().item()}
        nothing = reduce_metrics({"loss": math.nan}, weight=0)
        some = reduce_metrics({"loss": 4.0 if world.rank() else math.nan}, weight=world.rank())
        return reduce_metrics(mine, weight=len(values)), math.isnan(nothing["loss"]), some

    assert two.run(work) == [({"hits": 0.5, "loss": 3.0}, True, {"loss": 4.0})] * 2


def test_accumulating_gives_the_gradients_of_the_whole_batch(two: Any) -> None:
    def work(world: World) -> Any:
        model = DDP(blocks())
        x, y = (part.chunk(2)[world.rank()] for part in batch(12))
        updates = []
        for step in range(3):
            rows = slice(2 * step, 2 * step + 2)
            with accumulating(model, step, 3) as last:
                (loss_of(model(x[rows]), y[rows]) / 3).backward()
            updates.append(last)
        return updates, [p.grad for p in model.parameters()]

    model = blocks()
    x, y = batch(12)
    loss_of(model(x), y).backward()
    for updates, gradients in two.run(work):
        assert updates == [False, False, True]
        for gradient, parameter in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-10, atol=1e-12)
    with accumulating(nn.Linear(1, 1), 0, 2) as last:
        assert not last
    with (
        pytest.raises(UsageError, match="every must be at least 1 micro-batch; got 0"),
        accumulating(nn.Linear(1, 1), 0, 0),
    ):
        pass


def test_save_on_main_returns_once_the_checkpoint_exists(two: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "model.pt")

    def work(world: World, path: str) -> Any:
        model = DDP(blocks())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        save_on_main({"model": model.module.state_dict(), "epoch": 3}, path)
        state = load_checkpoint(path)
        fresh = blocks()
        fresh.load_state_dict(state["model"])
        same = all(torch.equal(a, b) for a, b in zip(fresh.parameters(), model.parameters(), strict=True))
        return state["epoch"], same

    assert two.run(work, path) == [(3, True)] * 2
    assert [item.name for item in tmp_path.iterdir()] == ["model.pt"]


def test_failed_save_raises_on_all_ranks(two: Any, tmp_path: Path) -> None:
    good = tmp_path / "model.pt"
    good.write_bytes(b"the last good one")

    def work(world: World, folder: str) -> list[str]:
        reported = []
        for state, name in (({"a": 1}, "missing/model.pt"), ({"f": lambda: 0}, "model.pt")):
            try:
                save_on_main(state, f"{folder}/{name}")
            except CommError as error:
                reported.append(str(error))
        return reported

    for reported in two.run(work, str(tmp_path)):
        assert len(reported) == 2
        assert all("Rank 0 could not write the checkpoint" in text for text in reported)
    assert good.read_bytes() == b"the last good one"
    assert [item.name for item in tmp_path.iterdir()] == ["model.pt"]
    with pytest.raises(UsageError, match="No checkpoint"):
        load_checkpoint(tmp_path / "nothing.pt")


def test_distributed_sampler_yields_every_sample_once_and_shuffles_by_epoch(two: Any) -> None:
    def work(world: World) -> Any:
        data = TensorDataset(torch.arange(10))
        sampler: DistributedSampler[Any] = DistributedSampler(data, seed=4)
        seen = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            seen.append([int(item) for (items,) in DataLoader(data, batch_size=2, sampler=sampler) for item in items])
        return seen

    first, second = two.run(work)
    for epoch in range(2):
        assert sorted(first[epoch] + second[epoch]) == list(range(10))
    assert first[0] != first[1]


def test_invalid_metrics_raise_on_all_ranks(two: Any) -> None:
    def work(world: World) -> list[str]:
        reported = []
        mine: list[dict[str, Any]] = [{"loss": 1.0}, {"accuracy": 1.0, "loss": 1.0}]
        for metrics, weight in ((mine[world.rank()], 1.0), (mine[0], world.rank() - 1.0), ({"a": torch.ones(2)}, 1.0)):
            with pytest.raises(UsageError) as caught:
                reduce_metrics(metrics, weight=weight)
            reported.append(str(caught.value))
        return reported

    for rank, (names, weight, shape) in enumerate(two.run(work)):
        assert f"rank {1 - rank} has others" in names
        assert weight == "weight must be a number of samples, 0 or more; got -1 on rank 0."
        assert "Metric 'a' must be one number, the mean over samples; got tensor([1., 1.])" in shape


def test_helpers_work_in_a_single_process_group(tmp_path: Path) -> None:
    group = ProcessGroup.mock()
    save_on_main({"epoch": 1}, tmp_path / "state.pt", group=group)
    assert load_checkpoint(tmp_path / "state.pt") == {"epoch": 1}
    assert reduce_metrics({"loss": 2.0}, weight=3, group=group) == {"loss": 2.0}
