"""Loading somebody else's checkpoint runs nothing of it."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_saver import save

from axon_nb.comm import World
from axon_nb.parallel.checkpoint import Checkpoints, CorruptCheckpointError
from axon_nb.parallel.checkpoint.checkpoints import read_metadata


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
