"""A rank that died is replaced: with the variables of a survivor, by itself, or after a second interrupt."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernel.driver import Kernel, Reply
from tests.kernel.processes import until

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
        kernel.ok("%load_ext axon_nb\n%distributed start -n 3")
        kernel.ok(TRAINING)
        assert "rank 2 exited with code 3" in kernel.run(DIE).traceback
        yield kernel, kernel.ok("%distributed repair --from 0")


def test_it_says_what_was_copied_and_what_not(repaired: tuple[Kernel, Reply]) -> None:
    lines = repaired[1].lines()
    assert lines[0].startswith("Replaced rank 2: fresh, with `DDP`, ")
    assert lines[0].endswith("and the random state of rank 0; the other ranks keep all they have.")
    assert lines[1:] == [
        "Not copied: `lock` holds a lock, which stays with its process.",
        "Not copied: `opened` is an open file, which stays with its process.",
        "Not copied: `running` is a generator, which stays with its process.",
    ]


def test_training_goes_on_with_equal_weights_and_optimizer_state(repaired: tuple[Kernel, Reply]) -> None:
    kernel, _ = repaired
    kernel.ok("%%distributed\nbefore = steps\nfor _ in range(4): step()")
    state = "steps - before, same(ddp.parameters()), same(moments()), round(scheduler.get_last_lr()[0], 9)"
    assert len(kernel.ok(f"%%distributed\nprint({state})").lines()) == 1
    assert "4, True, True" in kernel.ok(f"%%distributed\nprint(({state}))").stdout


def test_objects_keep_pointing_at_each_other(repaired: tuple[Kernel, Reply]) -> None:
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


def test_groups_are_its_own_even_those_that_the_source_is_not_in(repaired: tuple[Kernel, Reply]) -> None:
    code = "t = torch.ones(1)\nif rank: dist.all_reduce(t, group=pair)\nprint(rank, t.item())"
    assert sorted(repaired[0].ok(f"%%distributed\n{code}").lines()) == [
        "[rank 0] 0 1.0",
        "[rank 1] 1 2.0",
        "[rank 2] 2 2.0",
    ]


def test_random_numbers_are_the_sources() -> None:
    with Kernel() as kernel:
        kernel.ok("%load_ext axon_nb\n%distributed start -n 2")
        kernel.ok("%%distributed\nimport random, numpy as np\nfor f in (random.seed, np.random.seed): f(rank)")
        kernel.run("%%distributed\ntorch.manual_seed(rank)\nimport os\nif rank == 1: os.kill(os.getpid(), 9)")
        kernel.ok("%distributed repair --from 0")
        drawn = kernel.ok("%%distributed\nprint(random.random(), np.random.rand(), torch.rand(3).tolist())")
        assert len(drawn.lines()) == 1, drawn.stdout


def test_only_the_named_variables_and_large_ones() -> None:
    with Kernel() as kernel:
        kernel.ok("%load_ext axon_nb\n%distributed start -n 2")
        kernel.ok("%%distributed\nbig = torch.arange(40_000_000) + rank\nleft, small = 1, [1, 2]")
        told = kernel.ok("%distributed repair --ranks 1 --from 0 big small absent", timeout=120)
        assert "with `big`, `small` (305 MiB)" in told.stdout
        assert "Not copied: `absent` is no variable of rank 0." in told.lines()
        after = kernel.ok("%%distributed --ranks 1\nbig[0].item(), big[-1].item(), small, 'left' in globals()")
        assert after.lines() == ["[rank 1] (0, 39999999, [1, 2], False)"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--from 9", "Every rank is alive"),
        ("--ranks 1 --from 9", "--from 9: ranks are 0 to 3."),
        ("--ranks 1 --from 1", "that rank is replaced itself"),
        ("--ranks 1 model", "Names are copied from a rank: `--from 0 model`."),
        ("--ranks 1 --from x", "whole number"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_happens(kernel: Kernel, arguments: str, sentence: str) -> None:
    reply = kernel.run(f"%distributed repair {arguments}")
    assert reply.ename == "UsageError"
    assert sentence in reply.traceback
    assert kernel.ok("%%distributed\n'alive'").lines() == ["[ranks 0-3] 'alive'"]


SHARDED = """%%distributed
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, Replicate, distribute_tensor
world_mesh = init_device_mesh("cpu", (4,))
grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))
model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
for layer in model:
    fully_shard(layer, mesh=world_mesh)
fully_shard(model, mesh=world_mesh)
opt = torch.optim.Adam(model.parameters(), 1e-3)
model(torch.randn(2, 64)).sum().backward()
opt.step()
twice = distribute_tensor(torch.arange(8.0), grid, [Replicate(), Shard(0)])
once = distribute_tensor(torch.arange(16.0), world_mesh, [Shard(0)])
plain = nn.Linear(3, 3)
"""


def test_shards_that_only_the_dead_rank_held_are_named() -> None:
    with Kernel() as kernel:
        kernel.ok("%load_ext axon_nb\n%distributed start -n 4")
        kernel.ok(SHARDED)
        kernel.run(DIE)
        last = kernel.ok("%distributed repair --from 1").lines()[-1]
        # 2 x (64 x 64 + 64) numbers of 4 bytes in 4 parts; Adam has two of each, and no part of its step counters.
        assert last.startswith("Only rank 2 held its part of `model` (4 of 4 parameters, 8.12 KiB) and its part of `op")
        assert "(8 of 12 state tensors, 16.2 KiB) and its part of `once` (16 B)" in last
        assert last.endswith(": load a checkpoint into them on all ranks, or build them anew.")
        assert "`twice`" not in last
        assert "`layer`" not in last
        left = kernel.ok("%%distributed --ranks 0,1,3\nonce.to_local().tolist()").lines()
        assert sorted(left)[0] == "[rank 0] [0.0, 1.0, 2.0, 3.0]"


def test_sharded_objects_are_not_copied() -> None:
    with Kernel() as kernel:
        kernel.ok("%load_ext axon_nb\n%distributed start -n 4")
        kernel.ok(SHARDED)
        kernel.run(DIE)
        lines = kernel.ok("%distributed repair --from 1").lines()
        for name in ("model", "opt", "once", "twice"):
            assert f"Not copied: `{name}` is sharded: each rank holds its own part." in lines
        assert "Not copied: `grid` is a device mesh: make it anew on all ranks." in lines
        assert kernel.ok("%%distributed --ranks 2\nplain.weight.shape").lines() == ["[rank 2] torch.Size([3, 3])"]
        kernel.ok(SHARDED)


def test_a_stage_that_only_the_dead_rank_held_is_named() -> None:
    with Kernel() as kernel:
        kernel.ok("%load_ext axon_nb\n%distributed start -n 3")
        code = "from torch.distributed.pipelining import PipelineStage\n"
        code += "stage = PipelineStage(torch.nn.Linear(4, 4), rank, world_size, device)"
        kernel.ok(f"%%distributed\n{code}")
        kernel.run(DIE)
        lines = kernel.ok("%distributed repair --from 0").lines()
        assert "Not copied: `stage` is a pipeline stage: each rank holds its own." in lines
        assert lines[-1].startswith("Only rank 2 held stage 2 of 3 (`stage`): load a checkpoint")


def test_rank_0_and_unusual_ddp_objects_are_replaced_too() -> None:
    with Kernel() as kernel:
        kernel.ok("%load_ext axon_nb\n%distributed start -n 3")
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
            told = kernel.ok(f"%%distributed --ranks {ranks}\nprint({model}.module.weight.double().sum().item().hex())")
            assert len(told.lines()) == 1, model


def test_a_repair_waits_for_no_cell() -> None:
    with Kernel() as kernel:
        kernel.ok("%load_ext axon_nb\n%distributed start -n 3")
        kernel.ok("%%distributed --ranks 0 --noblock --out handle\nimport time\ntime.sleep(600)")
        reply = kernel.run("%distributed repair --ranks 2")
        assert "Ranks 0 still run a cell: wait for its end or interrupt it, then repair." in reply.traceback
        kernel.ok("handle.cancel()\ntry: handle.result(30)\nexcept KeyboardInterrupt: pass")
        assert "Replaced rank 2" in kernel.ok("%distributed repair --ranks 2").stdout


def test_auto_repair_replaces_before_the_next_cell() -> None:
    with Kernel() as kernel:
        kernel.ok("%load_ext axon_nb\n%distributed start -n 3\n%distributed config auto_repair=on")
        kernel.run(DIE)
        after = kernel.ok("%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()").lines()
        said = "Replaced rank 2, which exited with code 3: fresh and empty; the other ranks keep all they have."
        assert after == [said, "[ranks 0-2] 3.0"]
        assert kernel.ok("%%distributed\n1").lines() == ["[ranks 0-2] 1"]


IN_C = {
    "C code": "hashlib.pbkdf2_hmac('sha256', b'x', b'y', 2**31 - 1)",
    "C code that keeps the interpreter's lock": "sum(range(10**13))",
}


@pytest.mark.parametrize("what", IN_C)
def test_a_second_interrupt_replaces_ranks_in_c_code(what: str) -> None:
    with Kernel() as kernel:
        kernel.ok("%load_ext axon_nb\n%distributed start -n 3")
        kernel.ok("%%distributed\nimport hashlib\nkept = rank")
        code = f"print('go', flush=True)\nif rank == 1:\n    {IN_C[what]}\ndist.barrier()"
        request = kernel.submit(f"%%distributed\n{code}")
        kernel.wait_for_output(request, "go")
        kernel.interrupt()
        # Presses within a second of the first are the same wish; those after it, the second.
        assert not until(lambda: False, timeout=2)
        kernel.interrupt()
        reply = kernel.collect(request, timeout=60)
        assert reply.ename == "CellInterrupt"
        assert "[rank 1] is still in C code" in reply.traceback
        assert "Replaced rank 1: fresh and empty; the other ranks keep all they have." in reply.traceback
        after = kernel.ok("%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item(), globals().get('kept')")
        assert sorted(after.lines()) == ["[rank 0] (3.0, 0)", "[rank 1] (3.0, None)", "[rank 2] (3.0, 2)"]


def test_one_interrupt_kills_nothing_and_names_the_rank_in_c_code() -> None:
    with Kernel() as kernel:
        kernel.ok("%load_ext axon_nb\n%distributed start -n 2")
        kernel.ok("%%distributed\nimport hashlib, os")
        pid = kernel.ok("%%distributed --ranks 1\nprint(os.getpid())").lines()
        code = f"print('go', flush=True)\nif rank == 1:\n    {IN_C['C code']}"
        request = kernel.submit(f"%%distributed\n{code}")
        kernel.wait_for_output(request, "go")
        kernel.interrupt()
        reply = kernel.collect(request, timeout=60)
        assert "ranks 0 have stopped." in reply.traceback
        assert "[rank 1] is still in C code at line 4 and does not react to interrupts" in reply.traceback
        assert "Interrupt once more" in reply.traceback
        assert "still stuck in an earlier cell" in kernel.run("%%distributed\n1").traceback
        kernel.ok("%distributed repair --ranks 1")
        assert kernel.ok("%%distributed --ranks 1\nimport os\nprint(os.getpid())").lines() != pid
