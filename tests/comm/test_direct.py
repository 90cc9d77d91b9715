"""Direct calls on torch's groups: no hook is missing, and the public functions are called where they do more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from axon_nb import comm
from axon_nb.comm.collectives import direct
from axon_nb.records.hooks import missing_hooks

CALLS = {
    "all_reduce": comm.all_reduce,
    "all_gather": comm.all_gather,
    "broadcast": comm.broadcast,
    "reduce_scatter": comm.reduce_scatter,
}


@pytest.fixture(autouse=True)
def alone(tmp_path: Path) -> Iterator[None]:
    """Create a Gloo world of this process alone."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_torch_has_the_hooks() -> None:
    assert missing_hooks("comm.direct") == []
    assert not direct.HOOKS_MISSING


@pytest.mark.parametrize("without_hooks", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_single_rank_gets_its_own_values(call: str, without_hooks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "HOOKS_MISSING", without_hooks)
    values = torch.arange(6.0).view(3, 2)
    assert torch.equal(CALLS[call](values.clone()), values)


class Seen(TorchFunctionMode):
    """Records which torch functions are called while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def test_dispatch_mode_sees_the_public_function() -> None:
    with Seen() as seen:
        comm.all_reduce(torch.ones(2))
    assert "all_reduce" in seen.names


def test_calls_in_a_coalescing_block_are_coalesced() -> None:
    values = [torch.ones(2), torch.full((2,), 3.0)]
    with dist._coalescing_manager():
        for value in values:
            comm.all_reduce(value)
        assert [len(calls) for calls in dist.distributed_c10d._world.pg_coalesce_state.values()] == [2]
    assert [value.tolist() for value in values] == [[1.0, 1.0], [3.0, 3.0]]
