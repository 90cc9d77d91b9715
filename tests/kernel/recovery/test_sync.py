"""`%distributed sync`: all ranks get one rank's models and optimizers in place; sharded objects are refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kernel import Kernel

SETUP = """%%distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.fsdp import fully_shard

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
model = DDP(net)
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
sharded = fully_shard(nn.Linear(8, 8))

def step(model=model):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    scheduler.step()

def everything():
    state = optimizer.state_dict()
    tensors = [*net.state_dict().values(), *(v for s in state['state'].values() for v in s.values())]
    numbers = [scheduler.last_epoch, state['param_groups'][0]['lr']]
    return torch.cat([t.double().flatten() for t in tensors] + [torch.tensor(numbers, dtype=torch.double)])

def same():
    own = everything()
    others = [torch.zeros_like(own) for _ in range(world_size)]
    dist.all_gather(others, own)
    return [torch.equal(own, other) for other in others]

step()
"""
APART = "%%distributed\nfor _ in range(rank): step(net)\nlen(set(map(float, everything())))"


@pytest.fixture(scope="module")
def trained() -> Iterator[Kernel]:
    """A kernel whose 2 ranks have a model, its optimizer and a model that is split over them."""
    with Kernel() as kernel:
        kernel.load_and_warm_up()
        kernel.ok("%distributed start -n 2")
        kernel.ok(SETUP)
        yield kernel


@pytest.mark.parametrize("source", [0, 1])
def test_sync_copies_weights_and_optimizer_state_to_all_ranks(trained: Kernel, source: int) -> None:
    trained.ok(APART)
    trained.ok("%%distributed --out before\neverything().tolist()")
    assert "[rank 0] [True, False]" in trained.ok("%%distributed\nsame()").lines()
    reply = trained.ok(f"%distributed sync --from {source}")
    first, *rest = reply.lines()
    assert first.startswith(f"Copied `model`, `optimizer`, `scheduler` from rank {source} to all ranks (")
    assert rest == [
        "Not copied: `sharded` is sharded over ranks: load a checkpoint on all ranks, or rebuild it.",
    ]
    assert trained.ok("%%distributed\nsame()").lines() == ["[ranks 0-1] [True, True]"]
    trained.ok("%%distributed --out after\neverything().tolist()")
    assert trained.value(f"all(after[r] == before[{source}] for r in (0, 1))") is True
    trained.ok("%%distributed\ntorch.manual_seed(rank)\nstep()")
    weights = "%%distributed\nown = torch.cat([p.detach().flatten() for p in net.parameters()])"
    both = "pair = [torch.zeros_like(own) for _ in range(2)]\ndist.all_gather(pair, own)\ntorch.equal(*pair)"
    assert trained.ok(f"{weights}\n{both}").lines() == ["[ranks 0-1] True"]


def test_sync_copies_only_named_variables(trained: Kernel) -> None:
    trained.ok(APART)
    reply = trained.ok("%distributed sync model")
    assert reply.stdout.startswith("Copied `model` from rank 0 to all ranks (")
    assert "[rank 0] [True, False]" in trained.ok("%%distributed\nsame()").lines()
    trained.ok("%distributed sync optimizer scheduler")
    assert trained.ok("%%distributed\nsame()").lines() == ["[ranks 0-1] [True, True]"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("sharded", "`sharded` is sharded over ranks: load a checkpoint on all ranks"),
        ("step", "`step` is not a module, optimizer or scheduler"),
        ("nowhere", "`nowhere` does not exist on ranks 0-1"),
        ("--from 7", "--from 7: ranks are 0 to 1."),
    ],
)
def test_sync_reports_uncopyable_variables(trained: Kernel, line: str, says: str) -> None:
    assert says in trained.run(f"%distributed sync {line}").traceback


def test_ranks_a_step_apart_are_reported_and_synced(trained: Kernel) -> None:
    """The step of rank 1 is made by hand: no interrupt could be relied on to hit between the two."""
    trained.ok("%distributed sync")
    ahead = "if rank == 1: optimizer.step()\ndist.barrier()\nif rank == 0: 1 / 0\ndist.barrier()"
    reply = trained.run(f"%%distributed\nstep()\n{ahead}")
    assert "ZeroDivisionError" in reply.traceback
    (line,) = [line for line in reply.lines() if "at step" in line]
    assert line.startswith("Rank 1 is at step ")
    assert "of `optimizer`, rank 0 at " in line
    assert line.endswith("Run `%distributed sync` to copy models and optimizers of rank 0 to all ranks.")
    trained.ok("%distributed sync")
    assert trained.ok("%%distributed\nsame()").lines() == ["[ranks 0-1] [True, True]"]
    reply = trained.run("%%distributed\nstep()\ndist.barrier()\nif rank == 0: 1 / 0\ndist.barrier()")
    assert "ZeroDivisionError" in reply.traceback
    assert "at step" not in reply.stdout
