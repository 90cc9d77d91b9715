"""A world grows and shrinks while it trains, and ends in the old or the new size whatever happens meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.script import Script

PREPARE = """
import os, signal, time
import torch.nn as nn
import axon_nb
from torch.utils.data import TensorDataset
from axon_nb.parallel import DDP, FSDP, ZeRO1
from torch.distributed.fsdp import fully_shard
from axon_nb.parallel.checkpoint import Checkpoints, ResumableSampler

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 30), nn.Tanh(), nn.Linear(30, 5))

def with_ddp():
    model = DDP(make(), bucket_size_mb=0.001)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

def with_zero():
    model = ZeRO1(make())
    return model, model.optimizer(torch.optim.AdamW, lr=1e-2)

def with_fsdp():
    model = FSDP(make())
    return model, model.optimizer(torch.optim.AdamW, lr=1e-2)

def with_torch_fsdp():
    model = make()
    fully_shard(model[0])
    fully_shard(model, reshard_after_forward=False)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

def train(model, optimizer, scheduler, first, count):
    losses = []
    for step in range(first, first + count):
        x = torch.randn(12, 16, generator=torch.Generator().manual_seed(step))
        loss = model(x[dist.get_rank() :: dist.get_world_size()]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses

def total():
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return int(ones)

class OnArrival:
    "Sends a signal to a process when a new rank gets this object."

    def __init__(self, number, pid):
        self.target = number, pid

    def __setstate__(self, state):
        import os, time

        number, pid = state["target"]
        os.kill(pid or os.getpid(), number)
        time.sleep(0.2)
"""
TRAINED = """
model, optimizer = with_{kind}()
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
train(model, optimizer, scheduler, 0, 3)
"""
CONTROL = """
other, its_optimizer = with_{kind}()
its_scheduler = torch.optim.lr_scheduler.LambdaLR(its_optimizer, lambda step: 0.9**step)
Checkpoints({folder!r}).load_latest(model=other, optimizer=its_optimizer, scheduler=its_scheduler)
"""


def cell(script: Script, code: str) -> dict[int, object]:
    """The values of a cell, by rank."""
    values: dict[int, object] = script.value(f"c.run({code!r}, quiet=True).values")
    return values


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Script]:
    """A script with the cluster `c` of its own."""
    with Script(tmp_path_factory.mktemp("resize")) as script:
        script.ok("import os, axon_nb\nc = axon_nb.start(2, devices='cpu', name='resized')")
        yield script


@pytest.fixture
def two(shared: Script) -> Script:
    """The script, with 2 fresh ranks that have the functions above."""
    if cell(shared, "len(globals())") == {} or shared.value("c.world_size") != 2 or shared.value("c.health.dead"):
        shared.ok("c.stop()\nc = axon_nb.start(2, devices='cpu', name='resized')")
    cell(shared, "get_ipython().reset(new_session=False)")
    cell(shared, PREPARE)
    return shared


@pytest.mark.parametrize("kind", ["ddp", "zero", "fsdp", "torch_fsdp"])
def test_losses_equal_those_of_a_checkpoint_loaded_on_that_number_of_ranks(
    kind: str, two: Script, tmp_path: Path
) -> None:
    cell(two, TRAINED.format(kind=kind))
    first = 3
    for size in (4, 3, 2):
        saved = f"Checkpoints({str(tmp_path)!r}).save({first}, model=model, optimizer=optimizer, scheduler=scheduler)"
        cell(two, saved)
        assert f" to {size} ranks" in two.value(f"str(c.resize({size}))")
        cell(two, CONTROL.format(kind=kind, folder=str(tmp_path)))
        losses = cell(two, f"train(model, optimizer, scheduler, {first}, 3)")
        assert losses == cell(two, f"train(other, its_optimizer, its_scheduler, {first}, 3)")
        assert len(losses) == size
        cell(two, "del other, its_optimizer, its_scheduler")
        first += 3


def test_names_samplers_and_functions_follow(two: Script) -> None:
    cell(
        two,
        """
counts = {"a": 1}
sampler = ResumableSampler(TensorDataset(torch.arange(24.0)), shuffle=False)
seen = [next(it) for it in [iter(sampler)] for _ in range(3)]

@axon_nb.on_resize
def note(old_size, new_size):
    global noted
    noted = old_size, new_size, total()
""",
    )
    assert "1 sampler" in two.value("str(c.resize(3))")
    after = cell(two, "[rank, world_size, os.environ['WORLD_SIZE'], counts, noted, len(sampler)]")
    assert after == {rank: [rank, 3, "3", {"a": 1}, (2, 3, 3), 6] for rank in range(3)}
    assert cell(two, "list(sampler)[0]") == {0: 6, 1: 7, 2: 8}  # 3 samples on each of 2 ranks came before
    assert two.value("len(c.status())") == 3


def test_groups_of_ranks_that_left_are_named_and_others_stay(two: Script) -> None:
    two.ok("c.resize(3)")
    cell(two, "first, last = dist.new_group([0, 1]), dist.new_group([1, 2])")
    reported = two.value("str(c.resize(2))")
    assert "Some ranks of `last` left" in reported
    assert "`first`" not in reported
    assert cell(two, "t = torch.ones(1); dist.all_reduce(t, group=first); int(t)") == {0: 2, 1: 2}


def test_what_cannot_be_carried_over_is_named_and_nothing_changes(two: Script) -> None:
    cell(
        two,
        """
from axon_nb.parallel.tensor import ColumnParallelLinear
wide = ColumnParallelLinear(8, 8)
""",
    )
    refused = two.run("c.resize(4)")
    assert refused.kinds[0] == "UsageError"
    assert "`wide` has tensor-parallel layers. Save a checkpoint, delete it with `del wide`" in refused.message
    assert cell(two, "total()") == {0: 2, 1: 2}


@pytest.mark.parametrize(
    ("size", "message"), [("2", "already has 2 ranks"), ("0", "at least 1 rank")], ids=["same", "none"]
)
def test_bad_sizes_get_one_sentence(size: str, message: str, two: Script) -> None:
    refused = two.run(f"c.resize({size})")
    assert refused.kinds[0] == "UsageError"
    assert message in refused.message


def test_a_new_rank_that_dies_leaves_the_old_world(two: Script) -> None:
    cell(two, TRAINED.format(kind="ddp"))
    cell(two, "bomb = OnArrival(signal.SIGKILL, 0)")
    failed = two.run("c.resize(4)")
    assert failed.kinds[0] == "StartError"
    assert "The world still has 2 ranks. All its ranks keep their state." in failed.message
    cell(two, "del bomb\nlosses = train(model, optimizer, scheduler, 3, 2)")
    assert cell(two, "[total(), world_size, os.environ['WORLD_SIZE']]") == {0: [2, 2, "2"], 1: [2, 2, "2"]}
    two.ok("c.resize(4)")
    assert cell(two, "total()") == dict.fromkeys(range(4), 4)


def test_an_interrupt_leaves_the_old_world(two: Script) -> None:
    cell(two, f"bomb = OnArrival(signal.SIGINT, {two.process.pid})")
    failed = two.run("c.resize(3)")
    assert "The resize was interrupted. The world still has 2 ranks." in failed.message
    assert cell(two, "total()") == {0: 2, 1: 2}


def test_a_rank_that_dies_leaves_the_old_world_for_repair(two: Script) -> None:
    cell(two, TRAINED.format(kind="ddp"))
    victim = cell(two, "os.getpid()")[1]
    cell(two, f"bomb = OnArrival(signal.SIGKILL, {victim})")
    failed = two.run("c.resize(4)")
    assert "The world still has 2 ranks. Run `%distributed repair` for rank 1." in failed.message
    cell_0 = two.value("c.run('bomb = None; [world_size, dist.get_world_size()]', ranks='0', quiet=True).values")
    assert cell_0 == {0: [2, 2]}
    two.ok("c.repair(from_rank=0)")
    assert cell(two, "train(model, optimizer, scheduler, 3, 2)[0] > 0 and total()") == {0: 2, 1: 2}


@pytest.mark.parametrize("size", [2, 4], ids=["old", "new"])
def test_a_notebook_that_dies_leaves_the_old_or_the_new_world(size: int, tmp_path: Path) -> None:
    with Script(tmp_path) as script:
        script.ok("import os, signal, axon_nb\nc = axon_nb.start(2, devices='cpu', name='left')")
        cell(script, PREPARE)
        cell(script, TRAINED.format(kind="fsdp"))
        if size == 2:  # while new ranks get the variables
            cell(script, f"bomb = OnArrival(signal.SIGKILL, {script.process.pid})")
        else:  # when the host agent has stored the new world, and no rank uses its new shards yet
            script.ok("""
from axon_nb.cluster.state import ClusterState
store = ClusterState._store
ClusterState._store = lambda self, facts: (store(self, facts), os.kill(os.getpid(), signal.SIGKILL))
""")
        script.submit("c.resize(4)")
        script.process.wait(120)
    with Script(tmp_path) as script:
        script.ok("import axon_nb\nc = axon_nb.attach('left')")
        assert script.value("c.world_size") == size
        assert cell(script, "total()") == dict.fromkeys(range(size), size)
        assert len(cell(script, "train(model, optimizer, scheduler, 3, 2)")) == size
        script.ok("c.stop()")
