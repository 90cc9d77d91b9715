"""The examples of the documentation of AxonML's modules, in its order, in mock worlds.

Examples that other tests cover are not repeated; `docs/parity/examples.csv` names them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from axon_nb.comm import (
    Backend,
    ProcessGroup,
    ReduceOp,
    World,
    all_reduce,
    all_reduce_mean,
    barrier,
)
from axon_nb.comm.world import torchrun_environment
from axon_nb.parallel import DDP, load_checkpoint, save_on_main


def test_process_groups() -> None:
    def main(_: World) -> Any:
        world = World.new()  # the group is there already
        group = ProcessGroup([0, 1, 2, 3])
        return world.rank(), world.world_size(), group.rank(), group.size(), group.ranks

    assert World.mock(4).run(main) == [(rank, 4, rank, 4, (0, 1, 2, 3)) for rank in range(4)]


def test_ddp_builder() -> None:
    def main(world: World) -> Any:
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        ddp_model = DDP(model, world, bucket_size_mb=25.0, broadcast_buffers=True)
        for step in range(2):
            ddp_model(torch.full((2, 4), float(world.rank() + step)) * torch.tensor([[1.0], [2.0]]))
        with torch.no_grad():
            ddp_model(torch.zeros(2, 4))  # begins with the statistics of rank 0
        return ddp_model.bucket_bytes_cap, model[1].running_mean.clone()

    (size, mean), (size_too, mean_too) = World.mock(2).run(main)
    assert size == size_too == 25 * 2**20
    assert torch.equal(mean, mean_too)


def test_barrier() -> None:
    arrived: list[int] = []

    def main(world: World) -> int:
        arrived.append(world.rank())
        barrier()
        return len(arrived)

    assert World.mock(4).run(main) == [4] * 4


def test_backends_and_operations() -> None:
    assert [Backend.GLOO, Backend.NCCL, Backend.MOCK] == ["gloo", "nccl", "mock"]

    def main(world: World) -> Any:
        own = float(world.rank() + 1)
        operations = (ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.MAX, ReduceOp.MIN)  # Mean is AVERAGE
        return world.backend, [all_reduce(torch.tensor(own), op).item() for op in operations]

    assert World.mock(3).run(main) == [(Backend.MOCK, [6.0, 2.0, 3.0, 1.0])] * 3


def test_basic_ddp_training(tmp_path: Path) -> None:
    def main(world: World, path: str) -> Any:
        rank, world_size = world.rank(), world.world_size()
        ddp_model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), world)
        generator = torch.Generator().manual_seed(0)
        data = torch.randn(60, 8, generator=generator)
        dataset = TensorDataset(data, data[:, :3].argmax(1))
        sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
        loader = DataLoader(dataset, batch_size=10, sampler=sampler)
        optimizer = torch.optim.Adam(ddp_model.parameters(), lr=0.05)
        history = []
        for epoch in range(8):
            sampler.set_epoch(epoch)
            epoch_loss = 0.0
            for x, y in loader:
                loss = F.cross_entropy(ddp_model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                epoch_loss += loss.item() / len(loader)
            history.append(all_reduce_mean(torch.tensor(epoch_loss)).item())
        save_on_main(ddp_model.module.state_dict(), path)
        return history, load_checkpoint(path), ddp_model.module.state_dict()

    answers = World.mock(2).run(main, str(tmp_path / "checkpoint.pt"))
    (history, saved, _), _ = answers
    assert history[-1] < 0.8 * history[0]
    for theirs, _, state in answers:
        assert theirs == history
        assert all(torch.equal(value, saved[name]) for name, value in state.items())


def test_multi_node_setup() -> None:
    """Two nodes of four ranks, each with the variables that its user sets by hand."""
    for rank in (0, 4):
        given = {"MASTER_ADDR": "192.168.1.1", "MASTER_PORT": "29500", "WORLD_SIZE": "8", "RANK": str(rank)}
        found = torchrun_environment({**given, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4", "HOME": "/"})
        assert found == {**given, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
        assert (torchrun_environment(given) or {}).items() >= given.items()
