"""A replaced rank gets a survivor's variables as one object graph, and training continues with them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kernel import FreshCluster, Kernel, Reply

TRAINING = """%%distributed
import collections, random, threading
import numpy as np
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.manual_seed(rank)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
    def forward(self, x):
        return self.layers(x)

pair = dist.new_group([1, 2])
ddp = DDP(Net(), bucket_cap_mb=0.002)
optimizer = torch.optim.AdamW(ddp.parameters(), 1e-2)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
Point = collections.namedtuple("Point", "x y")
bag = {"net": ddp.module, "point": Point(1, 2), "step of": None}
data = TensorDataset(torch.arange(24.0))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=4, sampler=sampler)
lock, opened, running = threading.Lock(), open("/dev/null"), (n for n in range(3))
base = torch.zeros(8)
view = base[2:4]
steps = 0

def step():
    global steps
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * steps + rank))
    optimizer.zero_grad()
    ddp(x).square().mean().backward()
    optimizer.step()
    scheduler.step()
    steps += 1

def same(tensors):
    own = torch.cat([t.detach().double().flatten() for t in tensors])
    others = [torch.zeros_like(own) for _ in range(world_size)]
    dist.all_gather(others, own)
    return all(torch.equal(own, other) for other in others)

def moments():
    return [optimizer.state[p]["exp_avg_sq"] for p in ddp.parameters()]

for _ in range(3):
    step()
"""
DIE = "%%distributed\nimport os\nif rank == 2: os._exit(3)\ndist.barrier()"


@pytest.fixture(scope="module")
def repaired() -> Iterator[tuple[Kernel, Reply]]:
    """A kernel with 3 ranks that train; rank 2 has died and was replaced with what rank 0 has."""
    with Kernel() as kernel:
        kernel.load_and_warm_up()
        kernel.ok("%distributed start -n 3")
        kernel.ok(TRAINING)
        assert "rank 2 exited with code 3" in kernel.run(DIE).traceback
        yield kernel, kernel.ok("%distributed repair --from 0")


def test_repair_reports_copied_and_skipped_variables(repaired: tuple[Kernel, Reply]) -> None:
    lines = repaired[1].lines()
    assert lines[0].startswith("Replaced rank 2: new, with `DDP`, ")
    assert lines[0].endswith("and the random state of rank 0. All other ranks keep their state.")
    assert lines[1:] == [
        "Not copied: `lock` holds a lock, which stays with its process.",
        "Not copied: `opened` is an open file, which stays with its process.",
        "Not copied: `running` is a generator, which stays with its process.",
    ]


def test_training_continues_with_equal_weights_and_optimizer_state(repaired: tuple[Kernel, Reply]) -> None:
    kernel, _ = repaired
    kernel.ok("%%distributed\nbefore = steps\nfor _ in range(4): step()")
    state = "steps - before, same(ddp.parameters()), same(moments()), round(scheduler.get_last_lr()[0], 9)"
    assert len(kernel.ok(f"%%distributed\nprint({state})").lines()) == 1
    assert "4, True, True" in kernel.ok(f"%%distributed\nprint(({state}))").stdout


def test_object_references_are_preserved(repaired: tuple[Kernel, Reply]) -> None:
    kernel, _ = repaired
    checks = [
        "bag['net'] is ddp.module",
        "scheduler.optimizer is optimizer",
        "optimizer.param_groups[0]['params'][0] is next(ddp.parameters())",
        "type(bag['point']) is Point and type(ddp.module) is Net",
        "loader.sampler is sampler and sampler.rank == rank",
        "step.__globals__ is globals()",
        "(base.fill_(7), view.sum().item())[1] == 14",
        "ddp.process_group is dist.group.WORLD",
        "rank == dist.get_rank() and world.rank() == rank",
    ]
    for check in checks:
        assert kernel.ok(f"%%distributed\nprint(bool({check}))").lines() == ["[ranks 0-2] True"], check


def test_replaced_rank_gets_its_groups_even_without_the_source(repaired: tuple[Kernel, Reply]) -> None:
    code = "t = torch.ones(1)\nif rank: dist.all_reduce(t, group=pair)\nprint(rank, t.item())"
    assert sorted(repaired[0].ok(f"%%distributed\n{code}").lines()) == [
        "[rank 0] 0 1.0",
        "[rank 1] 1 2.0",
        "[rank 2] 2 2.0",
    ]


def test_random_state_is_copied_from_the_source(fresh_cluster: FreshCluster) -> None:
    kernel = fresh_cluster(2)
    kernel.ok("%%distributed\nimport random, numpy as np\nfor f in (random.seed, np.random.seed): f(rank)")
    kernel.run("%%distributed\ntorch.manual_seed(rank)\nimport os\nif rank == 1: os.kill(os.getpid(), 9)")
    kernel.ok("%distributed repair --from 0")
    drawn = kernel.ok("%%distributed\nprint(random.random(), np.random.rand(), torch.rand(3).tolist())")
    assert len(drawn.lines()) == 1, drawn.stdout


@pytest.mark.slow
def test_only_named_variables_are_copied_even_if_large(fresh_cluster: FreshCluster) -> None:
    kernel = fresh_cluster(2)
    kernel.ok("%%distributed\nbig = torch.arange(40_000_000) + rank\nleft, small = 1, [1, 2]")
    reported = kernel.ok("%distributed repair --ranks 1 --from 0 big small absent", timeout=120)
    assert "with `big`, `small` (305 MiB)" in reported.stdout
    assert "Not copied: `absent` does not exist on rank 0." in reported.lines()
    after = kernel.ok("%%distributed --ranks 1\nbig[0].item(), big[-1].item(), small, 'left' in globals()")
    assert after.lines() == ["[rank 1] (0, 39999999, [1, 2], False)"]


@pytest.mark.slow
def test_rank_0_and_unusual_ddp_objects_are_replaced_too(fresh_cluster: FreshCluster) -> None:
    kernel = fresh_cluster(3)
    code = """import torch.nn as nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP
others = dist.new_group([0, 2])
fixed = DDP(nn.Linear(8, 8), static_graph=True)
hooked = DDP(nn.Linear(8, 8))
hooked.register_comm_hook(None, default_hooks.allreduce_hook)
two = DDP(nn.Linear(8, 8), process_group=others) if rank != 1 else None
models = [model for model in (fixed, hooked, two) if model is not None]
optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in models]
def step(seed):
    for model, optimizer in zip(models, optimizers):
        optimizer.zero_grad()
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed + rank))).sum().backward()
        optimizer.step()
for seed in range(3): step(seed)"""
    kernel.ok(f"%%distributed\n{code}")
    assert "Replaced rank 0" in kernel.ok("%distributed repair --ranks 0 --from 2").stdout
    kernel.ok("%%distributed\nfor seed in range(3): step(10 + seed)")
    for ranks, model in (("0-2", "fixed"), ("0-2", "hooked"), ("0,2", "two")):
        reported = kernel.ok(f"%%distributed --ranks {ranks}\nprint({model}.module.weight.double().sum().item().hex())")
        assert len(reported.lines()) == 1, model
