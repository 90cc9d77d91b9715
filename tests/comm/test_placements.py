"""Declaring placements of plain tensors: what is refused, and what a declaration says."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import spmd_types
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from axon_nb.comm import World
from axon_nb.comm.placements import declare_placements, placed
from axon_nb.errors import UsageError
from axon_nb.parallel import Checkpoints, clip_grad_norm, make_mesh
from tests.support.ranks import RankWorld

types: Any = spmd_types
"""As it exports its names in a way that type checkers do not follow."""


def _refusal(*arguments: Any, **keywords: Any) -> str:
    with pytest.raises(UsageError) as error:
        declare_placements(*arguments, **keywords)
    return str(error.value)


def test_declaration_that_does_not_fit_is_refused() -> None:
    def refusals(world: World) -> list[str]:
        mesh, tensor = make_mesh(dp=2, tp=2, device="cpu"), torch.zeros(4, 3)
        whole = DTensor.from_local(tensor, mesh["tp"], [Shard(0)], run_check=False)
        return [
            _refusal(tensor, mesh, [Shard(0)]),
            _refusal(tensor, mesh["tp"], [Shard(2)]),
            _refusal(tensor, mesh["tp"], [Partial()]),
            _refusal(torch.zeros(5, 3), mesh["tp"], [Shard(0)], shape=(8, 3)),
            _refusal(whole, mesh["tp"], [Shard(0)]),
        ]

    count, dim, partial, shape, dtensor = World.mock(4).run(refusals)[1]
    assert count == "placements must have one entry for each of the 2 axes of the mesh; got (Shard(dim=0),)."
    assert dim == (
        "placements must be Replicate(), or Shard(dim) with a dimension of the tensor, which has 2; got Shard(dim=2)."
    )
    assert partial.endswith("got Partial(sum).")
    assert shape == (
        "shape (8, 3) with (Shard(dim=0),) gives this rank a part of shape (4, 3), but the tensor has (5, 3)."
    )
    assert dtensor == "tensor is a DTensor, which has its own placements; declare those of plain tensors only."


def test_declaration_belongs_to_one_tensor_and_ends_with_it() -> None:
    def look(world: World) -> tuple[Any, ...]:
        mesh = make_mesh(dp=2, tp=2, device="cpu")
        tensor = declare_placements(torch.zeros(4, 3), mesh, [Replicate(), Shard(-1)])
        found = placed(tensor)
        assert found is not None
        other = copy.deepcopy(tensor)
        alive = weakref.ref(tensor)
        result = (found.shape, found.placements == (Replicate(), Shard(1)), found.is_replicated, placed(other))
        del tensor, found
        gc.collect()
        return *result, alive()

    assert World.mock(4).run(look) == [((4, 6), True, False, None, None)] * 4


def test_types_of_plain_tensors_are_read() -> None:
    def look(world: World) -> list[Any]:
        mesh = make_mesh(dp=2, tp=2, device="cpu")
        dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
        spec = types.PartitionSpec
        typed = []
        for kinds, where in [
            ({dp: types.R, tp: types.V}, spec(None, tp)),
            ({dp: types.V, tp: types.V}, spec((dp, tp), None)),
            ({dp: types.I, tp: types.P}, None),
            ({dp: types.V, tp: types.V}, spec((tp, dp), None)),  # no placements say this
            ({dp: types.R, tp: types.V}, None),  # of what, nobody knows
            ({tp: types.S(0)}, None),
        ]:
            typed.append(types.assert_type(torch.zeros(4, 3), kinds, *([] if where is None else [where])))
        found = [placed(tensor) for tensor in (*typed, torch.zeros(4, 3))]
        own = [None if one is None else (one.shape, one.placements, one.mesh.mesh.tolist()) for one in found]
        assert found[0] is not None
        assert found[0].mesh.get_group(1) is tp
        return own

    over_both = [[0, 1], [2, 3]]
    for rank, found in enumerate(World.mock(4).run(look)):
        tp = over_both[rank // 2]
        assert found == [
            ((4, 6), (Replicate(), Shard(1)), over_both),
            ((16, 3), (Shard(0), Shard(0)), over_both),
            ((4, 3), (Replicate(), Partial()), over_both),
            None,
            None,
            ((8, 3), (Shard(0),), tp),
            None,
        ]


def test_a_model_of_typed_parts_is_clipped_and_saved_as_a_whole(tmp_path: Path) -> None:
    whole = torch.arange(24.0).view(8, 3)

    def model(world: World) -> torch.nn.Module:
        mesh = make_mesh(tp=world.world_size(), device="cpu")
        layer = torch.nn.Linear(3, 8 // world.world_size(), bias=False)
        layer.weight.data = whole.chunk(world.world_size())[world.rank()].clone()
        types.assert_type(layer.weight, {mesh.get_group("tp"): types.S(0)})
        return layer

    def save(world: World) -> float:
        layer = model(world)
        layer.weight.grad = layer.weight.detach().clone()
        Checkpoints(tmp_path).save(1, model=layer)
        return clip_grad_norm(layer, 1e9)

    def load(world: World) -> Any:
        layer = model(world)
        layer.weight.data.zero_()
        Checkpoints(tmp_path).load_latest(model=layer)
        return layer.weight.detach()

    with RankWorld(4) as four:
        assert four.run(save) == [pytest.approx(float(whole.norm()))] * 4
    with RankWorld(2) as two:
        assert torch.equal(torch.cat(two.run(load)), whole)
