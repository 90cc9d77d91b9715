"""Where models, inputs and meshes are (torch's meta device stands in for a GPU), and what meshes are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from axon_nb import comm
from axon_nb.comm import ProcessGroup, World, WorldClosedError
from axon_nb.comm.collectives.arguments import checking
from axon_nb.comm.collectives.movement import barrier
from axon_nb.comm.group import rank_device, resolve
from axon_nb.engine.groups.creation import init_default_group
from axon_nb.errors import UsageError
from axon_nb.parallel import DDP, FSDP, Pipeline, ShardingStrategy, axis_group, coordinates, make_mesh
from tests.engine.groups.native_ranks import run_on_ranks

ELSEWHERE = "The inputs are on meta, the model is on cpu: use `x.to(device)`."


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


@pytest.mark.parametrize("kind", ["ddp", *(one.value for one in ShardingStrategy if one.name != "HYBRID_SHARD")])
def test_inputs_on_another_device_raise(kind: str) -> None:
    def work(world: World) -> list[str]:
        model: Any = DDP(_net(), world) if kind == "ddp" else FSDP(_net(), world, strategy=ShardingStrategy(kind))
        messages = []
        for x in (torch.ones(2, 4, device="meta"), torch.ones(2, 4)):
            try:
                model(x).sum().backward()
            except UsageError as error:
                messages.append(str(error))
        return messages

    assert World.mock(2).run(work) == [[ELSEWHERE]] * 2


def test_pipeline_batches_on_another_device_raise() -> None:
    def work(world: World) -> list[str]:
        pipe = Pipeline(list(_net()), group=world, num_microbatches=2, loss=nn.functional.mse_loss)
        here, there = torch.ones(4, 4), torch.ones(4, 4, device="meta")
        messages = []
        for x, y in ((there, here), (here, there), (here, here)):
            try:
                pipe.step(x, y)
            except UsageError as error:
                messages.append(str(error))
        return messages

    assert (
        World.mock(2).run(work)
        == [
            [
                "inputs are on meta, the model is on cpu: use `x.to(device)` (on rank 0).",
                "targets are on meta, the model is on cpu: use `x.to(device)` (on rank 1).",
            ]
        ]
        * 2
    )


def test_mock_world_ranks_are_on_the_cpu() -> None:
    def work(world: World) -> tuple[str, str]:
        return str(rank_device(world.default_group())), make_mesh(dp=-1).device_type

    assert World.mock(2).run(work) == [("cpu", "cpu")] * 2


def _on_a_card(rank: int, store: Any) -> list[str]:
    dist.destroy_process_group()
    place: dict[str, Any] = {"store": store, "rank": rank, "world_size": 1, "device": torch.device("cuda:0")}
    init_default_group("gloo", **place, timeout_s=60, recoverable=True)
    return [str(rank_device(group)) for group in (resolve(None), ProcessGroup([0]))]


def test_gloo_group_on_a_gpu_has_its_device(tmp_path: Path) -> None:
    assert run_on_ranks(_on_a_card, 1, tmp_path) == {0: ["cuda:0", "cuda:0"]}


def test_checked_barrier_compares_devices() -> None:
    def work(world: World) -> bool:
        with checking():
            barrier(group=world.default_group())
        return True

    assert World.mock(2).run(work) == [True, True]


def test_axes_groups_and_coordinates(four: Any) -> None:
    def work(world: World) -> Any:
        mesh = make_mesh(dp=2, tp=-1, device="cpu")
        sums = {
            axis: comm.all_reduce_sum(torch.tensor([world.rank()]), group=axis_group(mesh, axis)).item()
            for axis in ("dp", "tp")
        }
        return mesh.mesh_dim_names, tuple(mesh.shape), coordinates(mesh), axis_group(mesh, "tp").ranks, sums

    answers = four.run(work)
    assert [(c["dp"], c["tp"]) for _, _, c, _, _ in answers] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [ranks for _, _, _, ranks, _ in answers] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [sums for *_, sums in answers] == [
        {"dp": 2, "tp": 1},
        {"dp": 4, "tp": 1},
        {"dp": 2, "tp": 5},
        {"dp": 4, "tp": 5},
    ]
    assert {(names, shape) for names, shape, *_ in answers} == {(("dp", "tp"), (2, 2))}


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        ({"dp": 2, "tp": 3}, "dp=2 x tp=3 needs 6 ranks, but the world has 4"),
        ({"dp": 3, "tp": -1}, "4 ranks are not divisible by 3, so tp has no valid size"),
        ({"dp": -1, "tp": -1}, "Only one axis can be -1; got dp and tp"),
        ({"dp": 0}, "dp must be at least 1, .*; got 0"),
        ({}, "at least one axis"),
    ],
)
def test_invalid_sizes_are_refused(axes: dict[str, int], text: str) -> None:
    def work(world: World) -> None:
        make_mesh(device="cpu", **axes)

    with pytest.raises(UsageError, match=text):
        World.mock(4).run(work)


def test_invalid_mesh_arguments_raise() -> None:
    with pytest.raises(WorldClosedError, match="No world is initialized"):
        make_mesh(dp=1)

    def work(world: World) -> None:
        axis_group(make_mesh(dp=2, device="cpu"), "tp")

    with pytest.raises(UsageError, match="The mesh has no axis 'tp'; it has dp"):
        World.mock(2).run(work)
