"""Checkpoints that cannot be written or read, and ranks killed while saving: the last good one remains."""

from __future__ import annotations

import itertools
import json
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from axon_nb.comm import World
from axon_nb.errors import UsageError
from axon_nb.parallel.checkpoint import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    Checkpoints,
    CheckpointSaveError,
    CheckpointWarning,
    CorruptCheckpointError,
    export_safetensors,
)
from tests.parallel.checkpoint.killing import Round
from tests.parallel.conftest import make


@pytest.fixture
def real_two(process_worlds: Any) -> Any:
    """Two processes."""
    return make("ranks-2", process_worlds)


def filled(value: float, width: int = 128) -> nn.Linear:
    """Return a layer of 64 KiB filled with one number."""
    layer = nn.Linear(width, width, bias=False)
    with torch.no_grad():
        layer.weight.fill_(value)
    return layer


def limit_files(size: int) -> None:
    """Limit the size of files that this process writes, in bytes; -1 removes the limit."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def test_failed_save_raises_on_all_ranks_and_keeps_the_last_one(real_two: Any, tmp_path: Path) -> None:
    def work(world: World, folder: str) -> Any:
        checkpoints = Checkpoints(folder)
        checkpoints.save(1, model=filled(1))
        reported = []
        # What several ranks have is written by one of them: here rank 0.
        limit_files(40_000 if world.rank() == 0 else -1)
        for save in (checkpoints.save, checkpoints.async_save):
            try:
                save(2, model=filled(2))
                checkpoints.wait()
            except CheckpointSaveError as error:
                reported.append(str(error))
        limit_files(-1)
        checkpoints.wait()
        left = sorted(item.name for item in Path(folder).iterdir())
        model = filled(0)
        resumed = checkpoints.load_latest(model=model)
        with checkpoints:
            checkpoints.async_save(3, model=filled(3))
        return reported, left, resumed and resumed.step, model.weight[0, 0].item(), checkpoints.steps()

    for reported, left, step, value, steps in real_two.run(work, str(tmp_path)):
        assert len(reported) == 2
        assert "could not be written on rank 0: " in reported[0]
        assert "File too large" in reported[0]
        assert reported[1].startswith("The background save of step 2 failed: rank 0: ")
        assert left == ["step_00000001"]
        assert (step, value, steps) == (1, 1.0, [1, 3])


def test_background_save_is_a_snapshot(two: Any, tmp_path: Path) -> None:
    def work(world: World, folder: str) -> Any:
        checkpoints, model = Checkpoints(folder), filled(1)
        pending = checkpoints.async_save(5, model=model, extra=[1, 2])
        with torch.no_grad():
            model.weight.fill_(2)
        pending.wait()
        resumed = checkpoints.load_latest(model=model)
        assert pending.done
        return pending.progress, pending.failure, repr(pending), resumed and resumed.extra, model.weight[0, 0].item()

    for outcome in two.run(work, str(tmp_path)):
        assert outcome == (1.0, None, "PendingSave(step=5, done)", [1, 2], 1.0)


def test_checkpoint_mismatches_are_reported(two: Any, tmp_path: Path) -> None:
    def work(world: World, folder: str) -> list[str]:
        checkpoints = Checkpoints(folder)
        saved = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
        checkpoints.save(1, model=saved)
        reported = []
        wider = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2, bias=False))
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
        other = torch.optim.SGD(saved.parameters())
        for call in (
            lambda: checkpoints.load(1, model=wider),
            lambda: checkpoints.load(1, model=nn.Linear(2, 3)),
            lambda: checkpoints.load(1, model=saved, optimizer=other),
            lambda: checkpoints.load(1, model=saved, scaler=torch.amp.GradScaler("cpu", enabled=False)),
            lambda: checkpoints.save(2, model=saved, optimizer=optimizer),
            lambda: checkpoints.save(2, model=saved, extra={"f": Path}),
            lambda: checkpoints.save(2, model=saved, sampler=3),
            lambda: checkpoints.save(2 + world.rank(), model=saved),
            lambda: checkpoints.save(-1, model=saved),
        ):
            try:
                call()
            except CheckpointError as error:
                reported.append(f"{type(error).__name__}: {error}")
        assert Checkpoints(folder).load(1, model=nn.Sequential(nn.Linear(2, 3)), strict=False).step == 1
        assert sorted(item.name for item in Path(folder).iterdir()) == ["step_00000001"]
        return reported

    for reported in two.run(work, str(tmp_path)):
        assert reported[0].startswith(
            "CheckpointMismatchError: Step 1 does not fit the model: 0.bias has shape (4,) here and (3,)"
        )
        assert "1.bias is not in the model" in reported[0]
        assert "weight is not in the checkpoint" in reported[1]
        assert reported[2] == "CheckpointMismatchError: Step 1 was saved without an optimizer; load it without one."
        assert reported[3] == "CheckpointMismatchError: Not in the checkpoint: scaler; it has none."
        assert reported[4].startswith(
            "CheckpointMismatchError: SGD has a parameter of shape (2, 2) that is not in the model"
        )
        assert reported[5].startswith("CheckpointError: Cannot save extra or an object's state: only tensors, numbers")
        assert reported[6].startswith("CheckpointError: sampler must have state_dict() or set_epoch(); got int")
        assert reported[7] == "CheckpointError: All ranks must save the same step; rank 0 saves 2, rank 1 3."
        assert reported[8] == "CheckpointError: step must be 0 or more; got -1."
        assert len(reported) == 9


def test_differing_folders_raise(two: Any, tmp_path: Path) -> None:
    def work(world: World, folder: str) -> list[str]:
        common, own = Checkpoints(f"{folder}/0"), Checkpoints(f"{folder}/{world.rank()}")
        common.save(1, model=filled(1))
        reported = []
        for call in (lambda: own.save(2, model=filled(2)), lambda: own.load_latest(model=filled(0))):
            with pytest.raises(CheckpointError) as caught:
                call()
            reported.append(str(caught.value))
        return reported

    for saving, loading in two.run(work, str(tmp_path)):
        assert "Rank 1 on host " in saving
        assert f"cannot see what rank 0 created in {tmp_path}/1" in saving
        assert f"cannot see {tmp_path}/1/step_00000001, which rank 0 can; use a folder" in loading
    assert [item.name for item in tmp_path.rglob("*") if item.is_dir()] == ["0", "step_00000001"]


def test_corrupt_checkpoint_is_reported_and_the_previous_one_loaded(tmp_path: Path) -> None:
    checkpoints, model = Checkpoints(tmp_path), filled(0)
    with pytest.raises(CheckpointNotFoundError, match=r"no checkpoint of step 1; there are no checkpoints\."):
        checkpoints.load(1, model=model)
    for step in (1, 2):
        checkpoints.save(step, model=filled(step))
    part = checkpoints.path(2) / "__0_0.distcp"
    part.write_bytes(part.read_bytes()[:-10])
    with pytest.raises(CorruptCheckpointError, match=r"__0_0.distcp has \d+ bytes, but should have \d+"):
        checkpoints.load(2, model=model)
    with pytest.warns(CheckpointWarning, match=r"__0_0.distcp has .* Resuming from step 1\."):
        assert checkpoints.load_latest(model=model)
    assert model.weight[0, 0] == 1
    (tmp_path / "step_00000001" / "manifest.json").write_text("{")
    with pytest.raises(CorruptCheckpointError, match=r"no readable manifest\.json, so it is incomplete; remove it"):
        checkpoints.load(1, model=model)
    with pytest.raises(CorruptCheckpointError, match=r"No checkpoint in .* is complete: .*__0_0.distcp has"):
        checkpoints.load_latest(model=model)
    with pytest.raises(UsageError, match="keep must be at least 1"):
        Checkpoints(tmp_path, keep=0)


def read_safetensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Read the tensors of a file according to the format's definition."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    kinds = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64}
    for name, entry in header.items():
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        flat = torch.frombuffer(bytearray(content[start:end]), dtype=kinds[entry["dtype"]])
        yield name, flat.reshape(entry["shape"])


def test_sharded_model_is_exported_whole(real_two: Any, tmp_path: Path) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3).bfloat16())

    def work(world: World, path: str) -> list[str]:
        from torch.distributed.fsdp import fully_shard

        model = build()
        fully_shard(model[0])
        reported = [str(export_safetensors(model, path))]
        for other in (nn.Linear(2, 2).to(torch.complex128), model):
            try:
                export_safetensors(other, path if other is not model else "/proc/none/model.safetensors")
            except CheckpointError as error:
                reported.append(f"{type(error).__name__}: {error}")
        return reported

    path = tmp_path / "models" / "model.safetensors"
    for name, dtype, folder in real_two.run(work, str(path)):
        assert name == str(path)
        assert (
            dtype == "CheckpointError: safetensors does not support complex128, the dtype of weight; convert it first."
        )
        assert "CheckpointSaveError: /proc/none/model.safetensors could not be written on rank 0" in folder
    expected = build().state_dict()
    found = dict(read_safetensors(path))
    assert list(found) == list(expected)
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    assert [item.name for item in path.parent.iterdir()] == ["model.safetensors"]


def test_program_finishes_its_last_save_before_exit(tmp_path: Path) -> None:
    code = """
import sys, torch
from axon_nb.parallel.checkpoint import Checkpoints
Checkpoints(sys.argv[1]).async_save(4, model=torch.nn.Linear(500, 500))
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert Checkpoints(tmp_path).steps() == [4]


def test_torch_can_read_checkpoints(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    Checkpoints(tmp_path).save(7, model=filled(7))
    dcp_to_torch_save(tmp_path / "step_00000007", tmp_path / "whole.pt")
    assert torch.equal(torch.load(tmp_path / "whole.pt")["model.weight"], filled(7).weight)
    assert issubclass(CheckpointMismatchError, CheckpointError)


ROOT = Path(__file__).resolve().parents[3]


def kill(folder: Path, rounds: int, seed: int) -> list[Round]:
    """Resume, save and be killed, repeatedly; the first round is not killed."""
    command = [sys.executable, "-m", "tests.parallel.checkpoint.killing", str(folder), str(rounds), str(seed)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return [Round(**json.loads(line)) for line in found.stdout.splitlines()]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("rounds", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_kill_during_save_never_leaves_a_bad_checkpoint(tmp_path: Path, rounds: int) -> None:
    reported = kill(tmp_path / "run", rounds, seed=rounds)
    assert len(reported) == rounds + 1
    assert [item.bad for item in reported] == [""] * len(reported)
    assert reported[0].resumed == -1
    assert reported[0].whole == 2
    # What was the latest is never lost: a run resumes from where the one before it came to, or from later.
    for before, after in itertools.pairwise(reported):
        assert after.resumed >= max(before.resumed, 3), reported
        assert after.whole in (2, 3)
    assert sum(bool(item.touch) for item in reported) >= rounds // 2
