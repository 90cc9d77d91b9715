"""Declaring placements of plain tensors: what is refused, and what a declaration says."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from axon_nb.comm import World
from axon_nb.comm.placements import declare_placements, placed
from axon_nb.errors import UsageError
from axon_nb.parallel import make_mesh


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
