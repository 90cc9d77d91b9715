"""Cells are taken back on all ranks, bit for bit, and training goes on as if they had never run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

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
