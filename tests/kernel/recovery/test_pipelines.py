"""Pipelines in cells, and their recovery."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from torch.distributed import config

from tests.support.kernel import FreshCluster, Kernel, Reply

PIPELINE = """%%distributed
import torch.nn as nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

class Fuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        blow("forward")
        return x.view_as(x)
    @staticmethod
    def backward(ctx, grad):
        blow("backward")
        return grad

class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
    def forward(self, x):
        return Fuse.apply(self.linear(x))

def blow(where):
    if where == armed and rank == 2:
        raise ValueError("bug")

def build():
    global parts, schedules
    torch.manual_seed(rank)
    parts = nn.ModuleList(Stage() for _ in range(3))
    places = ((rank, world_size), (rank, 2 * world_size), (rank + world_size, 2 * world_size))
    stages = [PipelineStage(part, *place, torch.device("cpu")) for part, place in zip(parts, places)]
    schedules = [
        Schedule1F1B(stages[0], 4, loss_fn=nn.functional.mse_loss),
        ScheduleInterleaved1F1B(stages[1:], 4, loss_fn=nn.functional.mse_loss),
    ]

def run(which):
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    last = {"target": torch.zeros(8, 8), "losses": []} if rank == world_size - 1 else {}
    parts.zero_grad()
    schedules[which].step(*(x,) if rank == 0 else (), **last)
    return torch.stack([p.grad for p in parts.parameters() if p.grad is not None and p.dim() == 2])

armed = ""
build()
good = [run(0), run(1)]
"""

SETUP = """%%distributed
import time
import torch.nn as nn
from axon_nb.parallel import Parallel3D, Pipeline, make_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel

meshes = {"pp x dp": make_mesh(pp=2, dp=2), "pp x tp": make_mesh(pp=2, tp=2)}

class Fuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        blow("forward")
        return x.view_as(x)
    @staticmethod
    def backward(ctx, grad):
        blow("backward")
        return grad

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
    def forward(self, x):
        return x + Fuse.apply(torch.tanh(self.norm(self.linear(x))))

count = {"forward": 0, "backward": 0}

def blow(where):
    count[where] += 1
    if where == armed == "forward" and rank == 2 and count[where] == 3:
        raise ValueError("bug")
    if where == armed == "backward" and rank == 1 and count[where] == last_backward:
        time.sleep(0.3)  # late stages have finished, and their ranks have time to go on
        raise ValueError("bug")

def build(schedule):
    global pipe, optimizer
    torch.manual_seed(7)
    model = nn.Sequential(*(Block() for _ in range(8)))
    options = dict(num_microbatches=8, loss=nn.functional.mse_loss)
    if schedule in meshes:
        plan = {"*.linear": ColwiseParallel(output_layouts=Replicate())} if "tp" in schedule else None
        pipe = Parallel3D(model, meshes[schedule], tp_plan=plan, **options)
    else:
        pipe = Pipeline.split(model, schedule=schedule, **options)
    optimizer = torch.optim.Adam(pipe.parameters(), lr=1e-2)

def step(number):
    count.update(forward=0, backward=0)
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    pipe.step(x, x.flip(0))
    optimizer.step()

def weights():
    return [(p.to_local() if isinstance(p, DTensor) else p).detach().clone() for p in pipe.parameters()]

armed = ""
good = {}

def undisturbed(schedule):
    global last_backward
    build(schedule)
    for number in range(3):
        step(number)
    good[schedule], last_backward = weights(), count["backward"]
"""
SCHEDULES = ["1F1B", "Interleaved1F1B", "ZBVZeroBubble", "pp x dp", "pp x tp"]
MORE = ["GPipe", "LoopedBFS", "InterleavedZeroBubble", "DualPipeV"]


@pytest.mark.parametrize("first", [True, False], ids=["its first step", "a later step"])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("which", [0, 1], ids=["1F1B", "interleaved"])
def test_pipeline_continues_after_a_failure_in(kernel: Kernel, which: int, where: str, first: bool) -> None:
    kernel.ok(PIPELINE)
    if first:
        kernel.ok("%%distributed\nbuild()")
    reply = kernel.run(f"%%distributed\narmed = {where!r}\nrun({which})")
    assert "ValueError: bug" in reply.traceback
    after = kernel.ok(f"%%distributed\narmed = ''\ntorch.equal(run({which}), good[{which}])")
    assert after.lines() == ["[ranks 0-3] True"]


def values(reply: Reply) -> set[str]:
    """What the ranks gave, however many came together."""
    return {line.partition("] ")[2] for line in reply.lines()}


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("schedule", [*SCHEDULES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_step_is_rerun_after_a_failure_in(kernel: Kernel, schedule: str, where: str) -> None:
    made = "isinstance(globals().get('good'), dict)"  # other tests of the session have names of their own
    if kernel.ok(f"%%distributed\n{made}").lines() != ["[ranks 0-3] True"]:
        kernel.ok(SETUP, timeout=120)
    kernel.ok(f"%%distributed\nundisturbed({schedule!r})", timeout=120)
    kernel.ok(f"%%distributed\nbuild({schedule!r})\nstep(0)")
    reply = kernel.run(f"%%distributed\narmed = {where!r}\nstep(1)")
    assert "ValueError: bug" in reply.traceback
    assert f"[rank {2 if where == 'forward' else 1}]" in reply.traceback
    kernel.ok("%%distributed\narmed = ''\nstep(1)\nstep(2)")
    same = f"all(map(torch.equal, weights(), good[{schedule!r}]))"
    assert values(kernel.ok(f"%%distributed\n{same}")) == {"True"}


def test_groups_split_from_another_survive_an_abort(kernel: Kernel) -> None:
    kernel.ok("%%distributed\nparts = [dist.split_group(split_ranks=[[0, 3], [1]]) for _ in range(2)]")
    use = """%%distributed
t = torch.tensor([rank])
if rank != 2: dist.all_reduce(t, group=parts[1])
int(t), parts[1] is dist.GroupMember.NON_GROUP_MEMBER"""
    expected = ["[ranks 0,3] (3, False)", "[rank 1] (1, False)", "[rank 2] (2, True)"]
    assert sorted(kernel.ok(use).lines()) == sorted(expected)
    assert (
        "ValueError: bug"
        in kernel.run("%%distributed\nif rank == 2: raise ValueError('bug')\ndist.barrier()").traceback
    )
    assert sorted(kernel.ok(use).lines()) == sorted(expected)
    reply = kernel.run("%%distributed\ndist.split_group(split_ranks=[[1, 0, 2, 3]])")
    assert "list the ranks of a group in ascending order; got [1, 0, 2, 3]" in reply.traceback


@pytest.fixture(scope="module")
def directed() -> Iterator[Kernel]:
    """Three ranks with a pipeline of torch's whose directions have groups of their own, and its gradients without."""
    options = [name for name in vars(config)["_config"] if name.startswith("pipeline_per_")]
    if not options:
        pytest.skip("torch before 2.14")
    with Kernel() as kernel:
        kernel.ok("%load_ext axon_nb")
        kernel.ok("%distributed start -n 3 --backend gloo")
        kernel.ok(PIPELINE)
        kernel.ok(f"%%distributed\nimport torch.distributed.config\ntorch.distributed.config.{options[0]} = True")
        yield kernel
        kernel.run("%distributed stop")


def test_a_step_is_aborted_while_its_directions_get_groups(directed: Kernel) -> None:
    fail = """%%distributed
split = dist.split_group
def fail(*args, group_desc=None, **kwargs):
    group = split(*args, group_desc=group_desc, **kwargs)
    if rank == 2 and group_desc in ("pp_p2p_upstream", "pp_p2p_round_3"):
        raise ValueError("the last group")  # the others have theirs
    return group
dist.split_group = fail
build()
run(0)
"""
    assert "ValueError: the last group" in directed.run(fail).traceback
    directed.ok("%%distributed\narmed = ''\ndist.split_group = split\nbuild()")
    assert values(directed.ok("%%distributed\ntorch.equal(run(0), good[0])")) == {"True"}


@pytest.mark.parametrize("which", [0, 1], ids=["1F1B", "interleaved"])
def test_directions_with_groups_of_their_own(directed: Kernel, which: int) -> None:
    directed.ok("%%distributed\nbuild()")
    after = f"%%distributed\narmed = ''\ntorch.equal(run({which}), good[{which}])"
    described = "{g.group_desc for g in dist.distributed_c10d._world.pg_names if 'pp_p2p' in str(g.group_desc)}"
    for where in ("forward", "backward"):
        assert values(directed.ok(after)) == {"True"}
        assert values(directed.ok(f"%%distributed\nlen({described}) > 1")) == {"True"}
        reply = directed.run(f"%%distributed\narmed = {where!r}\nrun({which})")
        assert "ValueError: bug" in reply.traceback
    assert values(directed.ok(after)) == {"True"}
    reply = directed.run(f"%%distributed\nif rank: run({which})")
    assert re.search(r"rank 1 waits in recv at line 2 .*for rank 0, which has finished the cell", reply.traceback)
    assert values(directed.ok(after)) == {"True"}


def test_schedules_of_torch_get_split_batches_without_a_hint(directed: Kernel) -> None:
    code = """%%distributed
build()
x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
first = {"arg_mbs": [(part,) for part in x.chunk(4)]} if rank == 0 else {}
last = {"target_mbs": list(torch.zeros(8, 8).chunk(4)), "losses": []} if rank == world_size - 1 else {}
schedules[0].step(**first, **last)
torch.equal(torch.stack([p.grad for p in parts.parameters() if p.grad is not None and p.dim() == 2]), good[0])
"""
    reply = directed.ok(code)
    assert (values(reply), reply.stderr) == ({"True"}, "")


def test_actions_are_drained_with_stage_and_microbatch(kernel: Kernel) -> None:
    code = """%%distributed
import torch.nn as nn
from axon_nb.parallel import Pipeline
from axon_nb.records import spans as trace
pipe = Pipeline.from_modules([nn.Linear(4, 4) for _ in range(4)], num_microbatches=4, loss=nn.functional.mse_loss)
before = trace.ring.position
x = torch.ones(8, 4)
pipe.step(x, x)
spans = [span for span in trace.ring.since(before)[0] if span.stage == rank]
(sorted({span.name for span in spans} - {"RECV_F", "RECV_B", "SEND_F", "SEND_B"}), {s.microbatch for s in spans})
"""
    assert values(kernel.ok(code)) == {"(['B', 'F'], {0, 1, 2, 3})"}


def test_pipeline_with_a_lost_stage_is_reported(fresh_cluster: FreshCluster) -> None:
    kernel = fresh_cluster(3)
    code = "from axon_nb.parallel import Pipeline\n"
    code += "pipe = Pipeline.from_modules([torch.nn.Linear(4, 4) for _ in range(3)])"
    kernel.ok(f"%%distributed\n{code}")
    reported = "`pipe` is a pipeline stage"
    assert reported in kernel.run("%distributed sync pipe").traceback
    kernel.run("%%distributed\nimport os\nif rank == 2: os._exit(3)\ndist.barrier()")
    lines = kernel.ok("%distributed repair --from 0").lines()
    assert "Not copied: `pipe` is a pipeline stage: each rank holds its own." in lines
    assert lines[-1].startswith("Only rank 2 held stage 2 of 3 (`pipe`): load a checkpoint")
