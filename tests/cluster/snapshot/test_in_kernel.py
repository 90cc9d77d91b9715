"""Undo and protection as a notebook uses them: by magics, after an interrupt, and with declared placements."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kernel import Kernel

TRAINING = """%%distributed
import hashlib, random
import torch.nn as nn
from axon_nb.parallel import declare_placements
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

mesh = init_device_mesh("cpu", (2,))
part = declare_placements(nn.Parameter(torch.full((2, 3), float(rank))), mesh, [Shard(0)])
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Linear(64, 64)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
losses = []
torch.manual_seed(rank)

def train(count):
    for _ in range(count):
        loss = model(torch.randn(8, 64) * random.random()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

def state():
    moments = [moment for entry in optimizer.state.values() for moment in entry.values()]
    tensors = (*model.parameters(), *moments, torch.get_rng_state(), part)
    digest = hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors))
    return digest.hexdigest(), losses, random.getstate()

train(3)
"""
ENDLESS = """%%distributed
optimizer.param_groups[0]["lr"] = 10.0
extra = 1
while True:
    train(1)
    print("trained", len(losses))"""


@pytest.fixture(scope="module")
def protected() -> Iterator[Kernel]:
    """A kernel with 2 protected ranks that have trained."""
    with Kernel() as kernel:
        kernel.ok("%load_ext axon_nb\n%distributed config undo_memory=64MiB")
        kernel.ok("%distributed start -n 2 --devices cpu --protect")
        kernel.ok(TRAINING)
        yield kernel
        kernel.ok("%distributed stop")


def test_interrupted_cell_is_undone_bit_for_bit(protected: Kernel) -> None:
    protected.ok("%%distributed --out before\nstate()")
    request = protected.submit(ENDLESS)
    protected.wait_for_output(request, "trained 6")
    protected.interrupt()
    assert not protected.collect(request).ok
    assert "ranks 0-1 have the state from before." in protected.ok("%distributed undo").stdout
    protected.ok("%%distributed --out after\nstate(), 'extra' in globals(), optimizer.param_groups[0]['lr']")
    assert protected.value("[after.values[r] == (before.values[r], False, 0.01) for r in (0, 1)]") == [True, True]
    protected.ok("%%distributed\ntrain(1)")


def test_ranks_started_with_protect_return_after_a_death(protected: Kernel) -> None:
    protected.ok("%%distributed\ntrain(2)")
    protected.ok("%%distributed --out before\nstate()")
    steps = protected.value("len(before.values[0][1])")
    assert f"protected: step {steps}" in protected.ok("%distributed status").result
    failed = protected.run("%%distributed\nimport os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)")
    assert "rank 1" in failed.traceback
    assert f"Kept: the state of all ranks at step {steps}" in failed.traceback
    assert f"All ranks are back at step {steps}" in protected.ok("%distributed repair").stdout
    protected.ok(
        "%%distributed --out after\nfrom axon_nb.comm.placements import placed\n"
        "state(), type(part).__name__, placed(part).shape, placed(part).mesh.mesh.tolist()"
    )
    declared = ("Parameter", (4, 3), [0, 1])
    assert protected.value(f"[after.values[r] == (before.values[r], *{declared!r}) for r in (0, 1)]") == [True, True]


TABLES = """%%distributed
import hashlib
import pandas as pd
num = pd.DataFrame({"a": [1, 2]})
txt = pd.DataFrame({"a": [1, 2], "s": ["x", "y"]})
ints = pd.Series([1, 2, 3]); sstr = pd.Series(["a", "b"]); cat = pd.Series(["a", "b"], dtype="category")
obj = pd.Series(["a", "b"], dtype=object); dt = pd.Series(pd.date_range("2024", periods=2))
nul = pd.Series([1, None], dtype="Int64")

def tables():
    values = [ints[0], sstr[0], cat[0], obj[0], dt[0].year, nul[0], list(num.index), list(num.columns)]
    return num.to_dict(), txt.to_dict(), *map(str, values)
"""
TABLE_CHANGES = (
    """num['b'] = 1; num.loc[0, 'a'] = 9; txt['b'] = 1; txt.loc[0, 's'] = 'changed'; ints[0] = 9; sstr[0] = 'changed'
cat[0] = 'b'; obj[0] = 'changed'; dt[0] = pd.Timestamp('2000'); nul[0] = 9""",
    """num.insert(1, 'c', 5); num.drop(columns='a', inplace=True); txt.rename(columns={'s': 'q'}, inplace=True)
num.index = ['i', 'j']""",
)


def test_tables_are_undone_and_branches_begin_with_the_same(protected: Kernel) -> None:
    protected.ok(f"{TABLES}\nbefore_change = tables()")
    same = "%%distributed --out same\ntables() == before_change"
    for change in TABLE_CHANGES:
        protected.ok(f"%%distributed\n{change}\nassert tables() != before_change")
        assert "ranks 0-1 have the state from before.\n" in protected.ok("%distributed undo").stdout
        protected.ok(same)
        assert protected.value("same.values") == {0: True, 1: True}
    said = protected.ok("%%distributed --branch k=2,3\nnum['a'] *= k * 10\nprint(num['a'].sum())").stdout
    assert [line for line in ("60", "90", "180") if line in said] == ["60", "90"]
    protected.ok(same)
    assert protected.value("same.values") == {0: True, 1: True}


def test_what_cannot_be_restored_is_named_first(protected: Kernel) -> None:
    protected.ok("%%distributed\ndigest = hashlib.sha256()")
    protected.ok("%%distributed\ndigest.update(b'more')")
    first, *_, last = protected.ok("%distributed undo").stdout.splitlines()
    assert first.startswith("Not undone: `digest` (a _hashlib.HASH), files")
    assert last.endswith("ranks 0-1 have the state from before, but for what is named above.")
    for _ in range(2):
        said = protected.ok("%%distributed --try\ndigest.update(b'more')").stdout
        assert "Not undone: `digest` (a _hashlib.HASH), files" in said
    said = protected.ok("%%distributed --branch k=1,2\ndigest.update(b'more')").stdout
    assert "The ranks have the state from before the cell, but for `digest`." in said
    protected.ok("%%distributed\npass")
    last = protected.ok("%distributed undo").stdout.splitlines()[-1]
    assert last.endswith("ranks 0-1 have the state from before."), "a cell that changes nothing"
    protected.ok("%%distributed\ndel digest")


MODES = """
import os
def t_modes():
    seen = torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(), torch.get_num_threads()
    return *seen, torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(), os.getcwd()
"""
SET = """
torch.set_default_dtype(torch.float64); torch.set_default_device("meta"); torch.set_grad_enabled(False)
torch.set_num_threads(torch.get_num_threads() + 1); torch.use_deterministic_algorithms(True)
torch.set_float32_matmul_precision("medium"); os.chdir({folder!r})
"""


def test_defaults_of_torch_and_the_folder_are_undone_and_the_same_for_each_branch(
    protected: Kernel, tmp_path: Path
) -> None:
    protected.ok(f"%%distributed\n{MODES}\nt_before, t_seen = t_modes(), []")
    changes = SET.format(folder=str(tmp_path))
    protected.ok(f"%%distributed\n{changes}\nassert all(a != b for a, b in zip(t_modes(), t_before))")
    protected.ok("%distributed undo")
    assert protected.ok("%%distributed\nt_modes() == t_before").lines() == ["[ranks 0-1] True"]
    branches = protected.ok(f"%%distributed --branch t_k=1,2\nprint(t_modes() == t_before)\n{changes}")
    assert branches.lines().count("[ranks 0-1] True") == 2
    assert protected.ok("%%distributed\nt_modes() == t_before").lines() == ["[ranks 0-1] True"]
    (folder := tmp_path / "gone").mkdir()
    protected.ok(f"%%distributed\nos.chdir({str(folder)!r})")
    protected.ok(f"%%distributed\nos.chdir(t_before[-1])\ndist.barrier()\nif rank == 0: os.rmdir({str(folder)!r})")
    assert "Not restored on ranks 0-1: the working directory (FileNotFound" in protected.ok("%distributed undo").stdout
    assert protected.ok("%%distributed\nos.getcwd() == t_before[-1]").lines() == ["[ranks 0-1] True"]


def test_memory_counts_the_copies(protected: Kernel) -> None:
    protected.ok("from axon_nb.cluster.inspection.memory import request_memory")
    protected.ok("from axon_nb.cluster.session import current")
    by_role = "[use.by_role.get('copies', 0) for use in request_memory(current.get().state, ()).measured.values()]"
    protected.ok("%%distributed --out size\ntrain(1); sum(3 * one.nbytes for one in model.parameters())")
    size = protected.value("size.values[0]")
    assert all(copies >= 2 * size for copies in protected.value(by_role)), "two slots hold weights and moments"
    protected.ok("%distributed config protect=off undo_memory=0")
    protected.ok("%%distributed\ntrain(1)")
    assert protected.value(by_role) == [0, 0]
