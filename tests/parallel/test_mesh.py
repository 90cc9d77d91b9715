"""Meshes: coordinates, groups, and invalid sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from axon_nb import comm
from axon_nb.comm import World, WorldClosedError
from axon_nb.errors import UsageError
from axon_nb.parallel import axis_group, coordinates, make_mesh


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
