"""Cells are taken back on all ranks, bit for bit, or run once per value of a variable, each from the same state."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from axon_nb.cluster.branches import read_plan
from axon_nb.errors import UsageError
from tests.support.script import Script

PREPARE = """
import copy
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

def make(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 31), nn.Tanh(), nn.Dropout(0.1), nn.Linear(31, 5))
    if kind == "fsdp":
        fully_shard(model[0])
        fully_shard(model)
    else:
        model = DistributedDataParallel(model, broadcast_buffers=False)
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)

def train(model, optimizer, count):
    losses = []
    for _ in range(count):
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
"""
START = "model, optimizer = make({kind!r}); torch.manual_seed(rank); losses = train(model, optimizer, 3)"
BAD = "optimizer.param_groups[0]['lr'] = 10.0; losses += train(model, optimizer, 3); extra = 1; del make"
HALF_WAY = """
losses.append(train(model, optimizer, 1))
model(torch.randn(8, 16)).sum().backward()
if rank == 1:
    raise ValueError("half way")
optimizer.step()
dist.barrier()
"""
MORE = "losses += train(model, optimizer, 4); losses"

PREPARE_BRANCHES = """
import os, signal, time
import axon_nb
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
lr = "before"

def train(count):
    for group in optimizer.param_groups:
        group["lr"] = lr
    for step in range(count):
        loss = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        axon_nb.log(loss=loss, step=step)
"""
CELL = "# %%distributed --branch lr\ntrain(5)"
DIGEST = "(lr, [p.sum().item() for p in model.parameters()], len(optimizer.state), torch.initial_seed())"
TROUBLE = """# %%distributed --branch lr
if lr == "raise" and rank == 1:
    raise ValueError("too high")
if lr == "hang" and rank == 1:
    time.sleep(1000)
if lr == "memory":
    raise torch.OutOfMemoryError("no room")
if isinstance(lr, float):
    train(3)
dist.barrier()
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Script]:
    """A script with 2 ranks that can undo."""
    with Script(tmp_path_factory.mktemp("undo")) as script:
        script.ok("import axon_nb\nc = axon_nb.start(2, devices='cpu', name='undo')")
        script.ok("from axon_nb.cluster.session import current\ncurrent.session().settings.set('undo_memory=64MiB')")
        script.ok(f"c.run({PREPARE!r})")
        yield script


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_training_after_undo_equals_an_undisturbed_run(trained: Script, kind: str) -> None:
    start = START.format(kind=kind)
    trained.ok(f"c.run({start!r}); expected = c.run({MORE!r}).values; c.run({start!r}); c.run({BAD!r}, cell=7)")
    trained.ok("report = c.undo()")
    assert trained.ok("print(report)").out.strip() == "Undid In [7]: ranks 0-1 have the state from before."
    trained.ok(f"failure = c.run({HALF_WAY!r}, check=False); print(c.undo())")
    assert "ValueError" in trained.ok("print(failure.errors[1])").out
    trained.ok(f"tried = c.run({BAD!r}, restores=True)")
    trained.ok(f"again = c.run({HALF_WAY!r}, restores=True, check=False)")
    values = trained.ok(f"after = c.run({MORE!r}).values; print(after == expected, len(after[0]))").out
    assert values.strip() == "True 7"


def test_undo_is_refused_on_all_ranks_if_one_cannot(trained: Script) -> None:
    trained.ok("c.run('x = torch.zeros(1)')")
    trained.ok("c.run('if rank == 1: big = torch.zeros(1 << 25)')")
    trained.ok("c.run('x += 1'); print(c.undo())")
    trained.ok("c.run('x += 1\\nif rank == 1: big += 1', cell=9)")
    reply = trained.run("c.undo()")
    assert "In [9] cannot be undone: rank 1 has changed `big`, which needs 128 MiB of `undo_memory`" in reply.message
    assert "; `%distributed config undo_memory=SIZE` sets it for later cells. Nothing has changed." in reply.message
    assert trained.ok("print(c.run('x.item()').values)").out.strip() == "{0: 1.0, 1: 1.0}"
    trained.ok("c.run('if rank == 1: del big')")


def test_two_cells_of_different_ranks_are_undone_together(trained: Script) -> None:
    trained.ok("c.run('y = [rank]'); c.run('y.append(5)'); c.run('y.append(6); it = (n for n in y)', ranks=[1])")
    text = trained.ok("c.run('z = 1', ranks=[1]); print(c.undo(3)); print(c.run('y').values)").out
    assert "Not undone: `it` (a generator), files" not in text
    assert "{0: [0], 1: [1]}" in text


def test_replaced_rank_cannot_undo_and_says_so(trained: Script) -> None:
    trained.ok("c.run('a = 1', cell=11); c.repair([1])")
    reply = trained.run("c.undo()")
    assert "In [11] cannot be undone: rank 1 was replaced or restarted since" in reply.message
    trained.ok("c.run('a = 1', cell=12); c.run('a = 2', cell=13); c.undo()")
    assert trained.ok("print(c.run('a').values)").out.strip() == "{0: 1, 1: 1}"


def test_others_are_restored_after_a_death_in_a_tried_cell(trained: Script) -> None:
    killed = "b = 2\nif rank == 1: import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    said = trained.ok(f"c.run('b = 1'); c.run({killed!r}, restores=True, check=False); c.repair(from_rank=0)").out
    assert "Rank 1 could not restore the state from before the cell." in said
    assert trained.value("c.run('b').values") == {0: 1, 1: 1}


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Script]:
    with Script(tmp_path_factory.mktemp("branches")) as script:
        script.ok("import axon_nb\nc = axon_nb.start(2, devices='cpu', name='branches')")
        script.ok(f"c.run({PREPARE_BRANCHES!r})")
        script.ok(
            "from axon_nb.cluster.branches import read_plan, run_branches\n"
            "from axon_nb.cluster.cells.driver import awaitable, finished\n"
            "def branch(code, values, keep=None, **options):\n"
            "    options = {'ranks': [0, 1], **options}\n"
            "    plan = read_plan('lr=' + values, keep)\n"
            "    return finished(run_branches(c, awaitable(c.run), code, options, plan=plan))\n"
            f"def digest():\n    return c.run({DIGEST!r}, quiet=True).values"
        )
        yield script


def test_branches_start_from_the_same_state_which_is_restored(ready: Script) -> None:
    ready.ok("before = digest()")
    said = ready.ok(f"b = branch({CELL!r}, '0.01,0.1,0.01')").out.splitlines()
    assert said[0] == "lr = 0.01"
    assert said[-1] == "The ranks have the state from before the cell."
    curves = ready.ok("print([[v for _, v in row.curves['loss']] for row in b.rows], digest() == before)").out
    first, second, third = curves[curves.index("[[") + 1 : curves.index("]]") + 1].split("], ")
    assert first.strip("[]") == third.strip("[]") != second.strip("[]")
    assert curves.strip().endswith("True")
    frame = ready.ok("print(list(b.to_frame().columns), (b.to_frame().peak_bytes > 1 << 20).all())").out
    assert frame.strip() == "['lr', 'state', 'loss', 'seconds', 'peak_bytes', 'error'] True"


def test_branch_with_the_lowest_loss_is_kept(ready: Script) -> None:
    said = ready.ok(f"b = branch({CELL!r}, '0.001,0.01,1.0', 'best:loss'); print(b.kept, digest()[0][0])").out
    assert "Kept lr = 0.01: the cell ran with it once more." in said
    assert said.splitlines()[-1] == "0.01 0.01"
    # as if only that one had run
    ready.ok(f"kept = digest(); c.run({PREPARE_BRANCHES!r}); c.run('lr = 0.01; train(5)')")
    assert ready.ok("print(digest() == kept or (digest(), kept))").out.strip() == "True"
    ready.ok(f"c.run({PREPARE_BRANCHES!r})")


def test_failures_are_rows_and_the_others_go_on(ready: Script) -> None:
    ready.ok("before = digest()")
    ready.ok(f"""b = branch({TROUBLE!r}, '0.1,"raise","hang","memory",0.01', 'lowest:accuracy', timeout=5)""")
    rows = ready.ok("print([(row.state, row.error, sorted(row.curves)) for row in b.rows], digest() == before)").out
    expected = (
        "[('ok', '', ['loss']), ('failed', 'ValueError: too high', []), ('timed_out', '', []), "
        "('failed', 'OutOfMemoryError: no room', []), ('ok', '', ['loss'])] True"
    )
    assert rows.strip() == expected


DEADLY = """# %%distributed --branch lr
import resource
trouble = "" if isinstance(lr, float) else lr
lr = 0.1 if trouble else lr
if trouble == "memory":
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, -1))
    try:
        torch.empty(1 << 40)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
train(2)
if trouble == "hang" and rank == 1:
    time.sleep(1000)
if trouble == "kill" and rank == 1 or trouble == "kill all":
    os.kill(os.getpid(), signal.SIGKILL)
train(2)
dist.barrier()
"""


def outcomes(script: Script, values: str) -> list[str]:
    """Run a cell that kills ranks; how each run ended, if the state is as before."""
    script.ok("before = digest()")
    script.ok(f"b = branch({DEADLY!r}, {values!r}, timeout=20)")
    assert script.value("digest() == before"), script.value("digest(), before")
    states = script.value("[row.state for row in b.rows]")
    assert isinstance(states, list)
    return states


def test_others_go_on_after_a_rank_was_killed(ready: Script) -> None:
    assert outcomes(ready, "0.1,'kill',0.1") == ["ok", "failed", "ok"]
    assert ready.value("b.rows[1].error") == "was killed by SIGKILL"
    assert ready.value("b.rows[0].curves == b.rows[2].curves")


def test_cell_on_some_ranks_ends_with_a_death(ready: Script) -> None:
    code = "# %%\nif lr and rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)"
    said = ready.ok(f"b = branch({code!r}, '0,1,2', ranks=[1]); print([row.state for row in b.rows])").out
    assert "Rank 1 died: run `%distributed repair`. The other ranks have the state from before the cell." in said
    assert said.splitlines()[-1] == "['ok', 'failed', 'not run']"
    ready.ok("c.repair(from_rank=0)")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_twenty_branches_with_a_hang_kills_and_no_memory(ready: Script) -> None:
    troubles = {2: "hang", 5: "kill", 9: "memory", 12: "kill all", 17: "kill"}
    values = [repr(troubles.get(number, 0.1)) for number in range(20)]
    states = outcomes(ready, ",".join(values))
    ended = {"hang": "timed_out", "": "ok"}
    assert states == [ended.get(troubles.get(number, ""), "failed") for number in range(20)]
    assert ready.value("len({str(row.curves) for row in b.rows if row.state == 'ok'})") == 1


@pytest.mark.parametrize(
    ("branch", "keep", "sentence"),
    [
        ("lr", None, "name a variable and its values"),
        ("lr=", None, "name a variable and its values"),
        ("1=2", None, "name a variable and its values"),
        ("lr=1,(", None, "name a variable and its values"),
        ("lr=1,2", "3", "--keep 3: must be one of the values 1, 2"),
        ("lr=1,2", "worst:loss", "--keep worst:loss: must be one of the values 1, 2"),
    ],
)
def test_bad_options_get_one_sentence(branch: str, keep: str | None, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        read_plan(branch, keep)


def test_values_are_expressions() -> None:
    assert read_plan("betas=(0.9,0.99),None", "betas=None").values == ("(0.9, 0.99)", "None")
    assert read_plan("lr=1e-3,3e-4", "0.001").keep == "0.001"
