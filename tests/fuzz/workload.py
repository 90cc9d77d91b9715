"""What the ranks train while faults strike. Sent to them as a cell: `rank`, `world_size`, `dist` and `torch` are there.

Every object has a history: its weights and optimizer state after 0, 1, 2 … undisturbed steps. Data depend on step and
rank alone, so whatever happens, each rank must be at one place of its own history, bit for bit.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

rank, world_size = dist.get_rank(), dist.get_world_size()

WIDTH, BATCH, LAST, MICROBATCHES = 32, 8, 24, 4
NAMES = ("ddp", "fsdp", "tensor", "pipeline", "interleaved")
PIPELINES = ("pipeline", "interleaved")

plan: dict[str, object] = {}
"""The fault: its point, object, number of steps before it, action and message; empty on ranks that do not fail."""


def strike() -> None:
    """Fail in the way that was planned; the time is written first."""
    action, message = plan["action"], plan["message"]
    with open(plan["clock"], "w") as clock:
        clock.write(repr(time.time()))
    plan.clear()
    if action == "raise":
        raise ValueError(message)
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "leave":
        os._exit(3)
    if action == "exit":
        sys.exit(4)
    if action == "segfault":
        ctypes.string_at(0)


def point(where: str, name: str | None = None) -> None:
    """Fail here, if it was planned for this point of this object's step."""
    if not plan or plan["point"] != where or plan["object"] not in (None, name or training[0]):
        return
    if plan["after"]:
        plan["after"] -= 1
    else:
        strike()


class Fuse(torch.autograd.Function):
    """Does nothing, in forward and in backward, unless a fault was planned there."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        point("forward")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        point("backward")
        return grad


class Block(nn.Module):
    """Two linear layers with a fuse between."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(Fuse.apply(torch.relu(self.inner(x))))


def square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The loss of the pipelines."""
    return (output - target).square().mean()


def build() -> None:
    """Make all objects, alike on all ranks, and their history."""
    global pair, rest
    plan.clear()
    before = dict(history)
    models.clear(), optimizers.clear(), schedules.clear()
    pair, rest = dist.new_group([0, 1]), dist.new_group([1, 2, 3])
    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(7)
    whole = nn.Sequential(*(Block() for _ in range(2 * world_size)))
    models["ddp"] = DistributedDataParallel(copy.deepcopy(whole[:3]), bucket_cap_mb=0.02)
    models["fsdp"] = copy.deepcopy(whole[:3])
    for block in models["fsdp"]:
        fully_shard(block, mesh=mesh)
    fully_shard(models["fsdp"], mesh=mesh)
    layers = {f"{i}.{part}": style() for i in range(2)
              for part, style in (("inner", ColwiseParallel), ("outer", RowwiseParallel))}  # fmt: skip
    models["tensor"] = parallelize_module(copy.deepcopy(whole[:2]), mesh, layers)
    own = [copy.deepcopy(whole[rank + offset]) for offset in (0, 0, world_size)]
    stages = [PipelineStage(own[0], rank, world_size, torch.device("cpu"))]
    stages += [PipelineStage(own[i], rank + (i - 1) * world_size, 2 * world_size, torch.device("cpu")) for i in (1, 2)]
    models["pipeline"], models["interleaved"] = own[0], nn.ModuleList(own[1:])
    schedules["pipeline"] = Schedule1F1B(stages[0], MICROBATCHES, loss_fn=square)
    schedules["interleaved"] = ScheduleInterleaved1F1B(stages[1:], MICROBATCHES, loss_fn=square)
    for name in NAMES:
        optimizers[name] = torch.optim.Adam(models[name].parameters(), 1e-3)
        done[name] = -1
        history[name] = []
        for _ in range(LAST + 1):
            step(name)
            history[name].append([tensor.clone() for tensor in tensors(name)])
        for kept, earlier in zip(history[name], before.get(name, history[name]), strict=True):
            assert all(map(torch.equal, kept, earlier)), f"{name}: the same training has given other weights"
        restore(name, 0)


models: dict[str, nn.Module] = {}
optimizers: dict[str, torch.optim.Optimizer] = {}
schedules: dict[str, object] = {}
history: dict[str, list[list[torch.Tensor]]] = {}
done: dict[str, int] = {}
training = ["", ""]
"""The object that steps, and what cannot be undone there."""


def step(name: str) -> None:
    """One step of one object."""
    training[0] = name
    model, optimizer = models[name], optimizers[name]
    point("before")
    optimizer.zero_grad()
    own = rank if name in ("ddp", "fsdp") else 0
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(100 * done[name] + own + 1000))
    if name in PIPELINES:
        losses: list[torch.Tensor] = []
        inputs = (x,) if rank == 0 else ()
        last = {"target": torch.zeros_like(x), "losses": losses} if rank == world_size - 1 else {}
        schedules[name].step(*inputs, **last)
        assert len(losses) == (MICROBATCHES if last else 0), losses
    else:
        loss = model(x).square().mean()
        point("after forward")
        loss.backward()
    point("before optimizer")
    training[1] = f"inside the optimizer's step of {name}"
    optimizer.step()
    training[1] = ""
    done[name] += 1


def train(names: list[str], steps: int | None) -> None:
    """Step the objects in turn; `steps` None: until ended from outside."""
    count = 0
    while steps is None or count < steps:
        moved = False
        for name in names:
            if done[name] < LAST:
                moved = True
                step(name)
        if not moved:
            dist.all_reduce(torch.ones(8))
        count += 1


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.data


@torch.no_grad()
def tensors(name: str) -> list[torch.Tensor]:
    """This rank's weights and optimizer state of one object, in a fixed order."""
    parameters = list(models[name].parameters())
    states = [optimizers[name].state[parameter] for parameter in parameters]
    return [local(p) for p in parameters] + [local(state[key]) for state in states for key in sorted(state)]


@torch.no_grad()
def restore(name: str, place: int) -> None:
    """Go to a place of the history."""
    for tensor, kept in zip(tensors(name), history[name][place], strict=True):
        tensor.copy_(kept)
    optimizers[name].zero_grad()
    done[name] = place


def place(name: str) -> int:
    """After how many steps the object is; -1: at no place of its history."""
    now = tensors(name)
    for number in (done[name], done[name] + 1):
        if 0 <= number <= LAST and all(map(torch.equal, now, history[name][number])):
            return number
    return -1


def sums() -> list[float]:
    """What the groups give: the default one, both subgroups, and a group made now."""
    answers = []
    for group, ranks in ((None, range(world_size)), (pair, (0, 1)), (rest, (1, 2, 3))):
        total = torch.full((1000,), float(rank + 1))
        if rank in ranks:
            dist.all_reduce(total, group=group)
            assert torch.equal(total, torch.full((1000,), float(sum(r + 1 for r in ranks)))), (rank, ranks, total)
        answers.append(total[0].item())
    said: list[object] = [None] * world_size
    dist.all_gather_object(said, {"rank": rank})
    assert said == [{"rank": r} for r in range(world_size)], said
    return answers


def after(start: int) -> dict[str, object]:
    """What the fault has left: where each object is, whether it steps on as ever, what this rank holds."""
    from axon_nb.engine.groups.creation import all_groups
    from axon_nb.engine.groups.state import current_groups

    plan.clear()
    inside, training[1] = training[1], ""
    pending = [call.name for call in current_groups().calls.pending()]
    found = {name: place(name) for name in NAMES}
    answers = sums()
    again = {}
    if "gloo" in dist.get_backend():
        # The first step of a rebuilt reducer has other buckets, in which Gloo's ring adds the ranks in another order.
        restore("ddp", start)
        step("ddp")
    for name in NAMES:
        restore(name, start)
        step(name)
        step(name)
        again[name] = place(name) == start + 2
        restore(name, start)
    gc.collect()
    with open("/proc/self/statm") as statm:
        rss = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "pending": pending, "found": found, "inside": inside,
        "sums": answers, "again": again, "epoch": current_groups().epoch,
        "threads": len(os.listdir("/proc/self/task")), "python_threads": threading.active_count(),
        "fds": len(os.listdir("/proc/self/fd")), "rss": rss,
        "leaked": len(current_groups().gloo.abandoned), "groups": len(all_groups()), "pid": os.getpid(),
    }  # fmt: skip
