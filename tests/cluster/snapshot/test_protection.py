"""Ranks die at any place of a step, a session is saved and started again: training goes on bit for bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kernel import Kernel
from tests.support.script import Script

PROGRAM = Path(__file__).parents[2] / "support" / "programs" / "protected.py"
STEPS = 6
STATUS = "from axon_nb.cluster.inspection.status import ClusterStatus, cluster_info"

KINDS = ("ddp", "grid", "pipeline")
WEIGHTS = """
whole = [getattr(value, "full_tensor", lambda: value)() for value in model.state_dict().values()]
moments = [getattr(entry["exp_avg"], "full_tensor", lambda: entry["exp_avg"])() for entry in optimizer.state.values()]
[value.tolist() for value in (*whole, *moments)], decay.last_epoch
"""

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
def protected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Script]:
    """A script with 4 protected ranks."""
    with Script(tmp_path_factory.mktemp("protected")) as script:
        script.ok("import axon_nb\nc = axon_nb.start(4, devices='cpu', name='protected')")
        script.ok("from axon_nb.cluster.session import current\nsettings = current.session().settings")
        script.ok(f"settings.set('protect=on'); program = open({str(PROGRAM)!r}).read(); c.run(program)")
        yield script


def undisturbed(script: Script, kind: str) -> None:
    """Train without a death; `expected` is how it ends."""
    build = f"build({kind!r})"
    script.ok(f"c.run({build!r}); c.run('train({STEPS})'); expected = c.run('state()').values")


def hit(script: Script, kind: str, place: str, ranks: list[int], at: int = 3) -> str:
    """Kill ranks in a step, repair and train to the end; return the report of the repair."""
    build, doomed = f"build({kind!r})", f"train({STEPS}, {place!r}, {at}) if rank in {ranks} else train({STEPS})"
    script.ok(f"c.run({build!r}); failed = c.run({doomed!r}, check=False)")
    assert script.value("[rank for rank, error in failed.errors.items() if error.kind == 'died']") == ranks
    report = script.ok("print(c.repair())").out
    script.ok(f"c.run('train({STEPS})'); after = c.run('state()').values")
    assert script.value("after == expected"), script.value("after, expected")
    return report


@pytest.mark.timeout(480)
def test_training_after_a_death_equals_an_undisturbed_run(protected: Script) -> None:
    undisturbed(protected, "ddp")
    report = hit(protected, "ddp", "between", [1])
    assert report.strip() == "Replaced rank 1. All ranks are back at step 3: 1 step must be repeated."
    hit(protected, "ddp", "save", [0])
    assert "protected: step 6" in protected.ok(f"{STATUS}; print(repr(ClusterStatus(cluster_info(c.state))))").out


@pytest.mark.timeout(480)
def test_sharded_training_after_a_death_equals_an_undisturbed_run(protected: Script) -> None:
    undisturbed(protected, "fsdp")
    hit(protected, "fsdp", "step", [2])
    hit(protected, "fsdp", "save", [1, 3])


@pytest.mark.timeout(480)
@pytest.mark.parametrize("kind", ["grid", "pipeline", "three_d", "zero"])
def test_sharded_states_of_two_dead_ranks_come_back(protected: Script, kind: str) -> None:
    undisturbed(protected, kind)
    hit(protected, kind, "step", [2, 3])


@pytest.mark.timeout(480)
def test_model_built_again_on_an_equal_mesh_uses_its_own_groups(protected: Script) -> None:
    undisturbed(protected, "grid")
    for dead in (3, 0):
        hit(protected, "grid", "between", [dead])


STEP_TWO_FIRST = """
one, two = (torch.optim.SGD([torch.ones(1, requires_grad=True)]) for _ in range(2))
two.step()
one.step()
"""
NUMBERS = """
from axon_nb.engine.session import current
{report.name: report.number for report in current().steps.report()}
"""


def test_optimizers_of_a_replacement_have_the_numbers_of_the_others(protected: Script) -> None:
    protected.ok(f"c.run({STEP_TWO_FIRST!r}); c.run('pass'); c.repair([2])")
    numbers = protected.value(f"list(c.run({NUMBERS!r}).values.values())")
    assert isinstance(numbers, list)
    assert numbers[2] == numbers[0]
    assert numbers[2]["two"] < numbers[2]["one"]


def test_what_is_not_protected_is_named_once(protected: Script) -> None:
    protected.ok("c.run('squares = (n * n for n in range(3))')")
    assert "Not protected: `squares` is a generator, which stays with its process." in shown(protected, "1")
    assert "Not protected" not in shown(protected, "del squares")


def shown(script: Script, code: str) -> str:
    """What a cell shows."""
    answer = script.ok(f"c.run({code!r})")
    return answer.out + answer.err


def test_without_a_common_step_new_ranks_are_empty(protected: Script) -> None:
    protected.ok("settings.set('protect=off'); c.run('x = 1')")
    assert "Replaced rank 1: new and empty" in protected.ok("print(c.repair([1]))").out
    protected.ok("settings.set('protect=on'); c.run(program)")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "zero", "tensor", "grid", "pipeline"])
def test_random_deaths_lose_nothing(protected: Script, kind: str, part: int) -> None:
    """Eleven deaths; together 216 of one rank and 48 of two, 72 in `optimizer.step` and 48 within a save."""
    choice = random.Random(f"{kind} {part}")
    places = choice.sample(["step", "save", "between"], 11, counts=[3, 2, 6])
    counts = choice.sample([1, 2], 11, counts=[9, 2])
    undisturbed(protected, kind)
    for place, count in zip(places, counts, strict=True):
        hit(protected, kind, place, sorted(choice.sample(range(4), count)), choice.randrange(STEPS))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Script]:
    """A script that saved sessions on 4 ranks, and stopped these; `expected` is how each training ends there."""
    folder = tmp_path_factory.mktemp("saved")
    with Script(folder) as script:
        script.ok("import axon_nb\nc = axon_nb.start(4, devices='cpu', name='saved')")
        script.ok("from axon_nb.cluster.transfer import load_session, save_session")
        script.ok(f"program = open({str(PROGRAM)!r}).read(); c.run(program); expected = dict()")
        for kind in (*KINDS, "fsdp"):
            build = f"build({kind!r}); train(3); squares = (n for n in ())"
            script.ok(f"c.run({build!r})")
            script.ok(f"said = save_session(c.cells, {kind!r}); weights = c.run({WEIGHTS!r}).values[0]")
            script.ok(f"c.run('train(6)'); expected[{kind!r}] = c.run('state()').values")
        yield script


@pytest.mark.timeout(480)
def test_as_many_ranks_continue_bit_for_bit(saved: Script) -> None:
    assert "Not saved: `squares` is a generator" in str(saved.value("said"))
    assert "Other numbers of ranks can load `model`." in str(saved.value("said"))
    saved.ok("c.stop(); c = axon_nb.start(4, devices='cpu', name='loaded')")
    for kind in KINDS:
        said = saved.ok(f"print(load_session(c.cells, {kind!r}))").out
        assert said.strip() == f"Loaded the session from {kind}: all variables and random states of 4 ranks."
        saved.ok("c.run('train(6)'); after = c.run('state()').values")
        assert saved.value(f"after == expected[{kind!r}]"), kind


@pytest.mark.timeout(480)
def test_another_number_of_ranks_gets_models_and_optimizers(saved: Script) -> None:
    saved.ok("c.stop(); c = axon_nb.start(2, devices='cpu', name='fewer')")
    assert (
        "Run the cells that create `model`, `optimizer`, `decay` first"
        in saved.run("load_session(c.cells, 'fsdp')").message
    )
    saved.ok("c.run(program); c.run('build(\"fsdp\"); train(1)')")
    said = saved.ok("print(load_session(c.cells, 'fsdp'))").out
    assert said.startswith("Loaded `model` from fsdp, which 4 ranks have saved. Other variables and random states stay")
    assert saved.value(f"c.run({WEIGHTS!r}).values[0] == weights")
    assert "is not a saved session" in saved.run("load_session(c.cells, 'nothing')").message
    assert (
        "exists and is not a saved session"
        in saved.run("import os; os.mkdir('other'); save_session(c.cells, 'other')").message
    )


@pytest.fixture(scope="module")
def protected_kernel() -> Iterator[Kernel]:
    """A kernel with 2 protected ranks that have trained."""
    with Kernel() as kernel:
        kernel.ok("%load_ext axon_nb\n%distributed config undo_memory=64MiB")
        kernel.ok("%distributed start -n 2 --devices cpu --protect")
        kernel.ok(TRAINING)
        yield kernel
        kernel.ok("%distributed stop")


def test_interrupted_cell_is_undone_bit_for_bit(protected_kernel: Kernel) -> None:
    protected_kernel.ok("%%distributed --out before\nstate()")
    request = protected_kernel.submit(ENDLESS)
    protected_kernel.wait_for_output(request, "trained 6")
    protected_kernel.interrupt()
    assert not protected_kernel.collect(request).ok
    assert "ranks 0-1 have the state from before." in protected_kernel.ok("%distributed undo").stdout
    protected_kernel.ok("%%distributed --out after\nstate(), 'extra' in globals(), optimizer.param_groups[0]['lr']")
    assert protected_kernel.value("[after.values[r] == (before.values[r], False, 0.01) for r in (0, 1)]") == [
        True,
        True,
    ]
    protected_kernel.ok("%%distributed\ntrain(1)")


def test_first_step_counts_as_one_although_it_is_protected(protected_kernel: Kernel) -> None:
    protected_kernel.ok(
        "%%distributed\nnew = torch.nn.Linear(4, 1)\ncounting = torch.optim.Adam(new.parameters())\n"
        "new(torch.ones(4)).sum().backward()"
    )
    protected_kernel.ok("%%distributed\ncounting.step()")
    counts = "%%rank 0\n[float(entry['step']) for entry in counting.state.values()]"
    assert protected_kernel.ok(counts).lines() == ["[rank 0] [1.0, 1.0]"]


def test_ranks_started_with_protect_return_after_a_death(protected_kernel: Kernel) -> None:
    protected_kernel.ok("%%distributed\ntrain(2)")
    protected_kernel.ok("%%distributed --out before\nstate()")
    steps = protected_kernel.value("len(before.values[0][1])")
    assert f"protected: step {steps}" in protected_kernel.ok("%distributed status").result
    failed = protected_kernel.run(
        "%%distributed\nimport os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert "rank 1" in failed.traceback
    assert f"Kept: the state of all ranks at step {steps}" in failed.traceback
    assert f"All ranks are back at step {steps}" in protected_kernel.ok("%distributed repair").stdout
    protected_kernel.ok(
        "%%distributed --out after\nfrom axon_nb.comm.placements import placed\n"
        "state(), type(part).__name__, placed(part).shape, placed(part).mesh.mesh.tolist()"
    )
    declared = ("Parameter", (4, 3), [0, 1])
    assert protected_kernel.value(f"[after.values[r] == (before.values[r], *{declared!r}) for r in (0, 1)]") == [
        True,
        True,
    ]


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


def test_tables_are_undone_and_branches_begin_with_the_same(protected_kernel: Kernel) -> None:
    protected_kernel.ok(f"{TABLES}\nbefore_change = tables()")
    same = "%%distributed --out same\ntables() == before_change"
    for change in TABLE_CHANGES:
        protected_kernel.ok(f"%%distributed\n{change}\nassert tables() != before_change")
        assert "ranks 0-1 have the state from before.\n" in protected_kernel.ok("%distributed undo").stdout
        protected_kernel.ok(same)
        assert protected_kernel.value("same.values") == {0: True, 1: True}
    said = protected_kernel.ok("%%distributed --branch k=2,3\nnum['a'] *= k * 10\nprint(num['a'].sum())").stdout
    assert [line for line in ("60", "90", "180") if line in said] == ["60", "90"]
    protected_kernel.ok(same)
    assert protected_kernel.value("same.values") == {0: True, 1: True}


def test_what_cannot_be_restored_is_named_first(protected_kernel: Kernel) -> None:
    protected_kernel.ok("%%distributed\ndigest = hashlib.sha256()")
    protected_kernel.ok("%%distributed\ndigest.update(b'more')")
    first, *_, last = protected_kernel.ok("%distributed undo").stdout.splitlines()
    assert first.startswith("Not undone: `digest` (a _hashlib.HASH), files")
    assert last.endswith("ranks 0-1 have the state from before, but for what is named above.")
    for _ in range(2):
        said = protected_kernel.ok("%%distributed --try\ndigest.update(b'more')").stdout
        assert "Not undone: `digest` (a _hashlib.HASH), files" in said
    said = protected_kernel.ok("%%distributed --branch k=1,2\ndigest.update(b'more')").stdout
    assert "The ranks have the state from before the cell, but for `digest`." in said
    protected_kernel.ok("%%distributed\npass")
    last = protected_kernel.ok("%distributed undo").stdout.splitlines()[-1]
    assert last.endswith("ranks 0-1 have the state from before."), "a cell that changes nothing"
    protected_kernel.ok("%%distributed\ndel digest")


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
    protected_kernel: Kernel, tmp_path: Path
) -> None:
    protected_kernel.ok(f"%%distributed\n{MODES}\nt_before, t_seen = t_modes(), []")
    changes = SET.format(folder=str(tmp_path))
    protected_kernel.ok(f"%%distributed\n{changes}\nassert all(a != b for a, b in zip(t_modes(), t_before))")
    protected_kernel.ok("%distributed undo")
    assert protected_kernel.ok("%%distributed\nt_modes() == t_before").lines() == ["[ranks 0-1] True"]
    branches = protected_kernel.ok(f"%%distributed --branch t_k=1,2\nprint(t_modes() == t_before)\n{changes}")
    assert branches.lines().count("[ranks 0-1] True") == 2
    assert protected_kernel.ok("%%distributed\nt_modes() == t_before").lines() == ["[ranks 0-1] True"]
    (folder := tmp_path / "gone").mkdir()
    protected_kernel.ok(f"%%distributed\nos.chdir({str(folder)!r})")
    protected_kernel.ok(
        f"%%distributed\nos.chdir(t_before[-1])\ndist.barrier()\nif rank == 0: os.rmdir({str(folder)!r})"
    )
    assert (
        "Not restored on ranks 0-1: the working directory (FileNotFound"
        in protected_kernel.ok("%distributed undo").stdout
    )
    assert protected_kernel.ok("%%distributed\nos.getcwd() == t_before[-1]").lines() == ["[ranks 0-1] True"]


def test_memory_counts_the_copies(protected_kernel: Kernel) -> None:
    protected_kernel.ok("from axon_nb.cluster.inspection.memory import request_memory")
    protected_kernel.ok("from axon_nb.cluster.session import current")
    by_role = "[use.by_role.get('copies', 0) for use in request_memory(current.get().state, ()).measured.values()]"
    protected_kernel.ok("%%distributed --out size\ntrain(1); sum(3 * one.nbytes for one in model.parameters())")
    size = protected_kernel.value("size.values[0]")
    assert all(copies >= 2 * size for copies in protected_kernel.value(by_role)), "two slots hold weights and moments"
    protected_kernel.ok("%distributed config protect=off undo_memory=0")
    protected_kernel.ok("%%distributed\ntrain(1)")
    assert protected_kernel.value(by_role) == [0, 0]
