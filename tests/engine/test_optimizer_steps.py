"""Models and optimizers that live on a rank, their steps, and their gradients."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from axon_nb.engine.groups import creation
from axon_nb.engine.groups.abort import AbortedError, AbortFlag
from tests.support.ranks import run_code

pytestmark = pytest.mark.timeout(600)

SCRIPT = """
import copy, gc, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from axon_nb.engine import live_objects as searched
from axon_nb.engine.groups import recovery as wrappers
from axon_nb.records.hooks import missing_hooks

kinds = {"ddp": wrappers.DDP, "fsdp": wrappers.FSDP, "schedules": wrappers._SCHEDULES}
passes = []
look = searched._scan
searched._scan = lambda classes: passes.append(len(classes)) or look(classes)

def found():
    return dict(zip(kinds, searched.live_objects(*kinds.values())))

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
early = DistributedDataParallel(nn.Linear(2, 2))
assert found()["ddp"] == [early] and len(passes) == 1

class Mine(DistributedDataParallel):
    __hash__ = None  # as a class with its own __eq__ has it
    def __eq__(self, other):
        raise AssertionError("compared")

mine = Mine(nn.Linear(2, 2))
assert {id(module) for module in found()["ddp"]} == {id(early), id(mine)}
copied = copy.deepcopy(early)
assert any(module is copied for module in found()["ddp"])
del mine, copied
gc.collect()
assert found()["ddp"] == [early] and len(passes) == 1

from torch.distributed.fsdp import fully_shard
model = fully_shard(nn.Linear(4, 4))
there = found()
assert there["fsdp"] == [model] and len(passes) == 1, "as torch's own table says"

from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
stage = PipelineStage(nn.Linear(2, 2), 0, 1, torch.device("cpu"))
first = ScheduleGPipe(stage, 1)
assert found()["schedules"] == [first] and len(passes) == 2
second = ScheduleGPipe(stage, 1)
assert found()["schedules"] == [first, second] and len(passes) == 2
assert missing_hooks("live_objects.states") == []

states = torch.distributed._composable_state
table = states._module_state_mapping
del states._module_state_mapping
assert missing_hooks("live_objects.states") == ["torch.distributed._composable_state._module_state_mapping"]
assert found()["fsdp"] == [model] and len(passes) == 3, "without the table all objects are looked through"
print("all held")
"""

TRAIN = """
import threading, time, types
import torch
from torch import nn
from axon_nb.engine.inspection.memory import GradientReader

state = types.SimpleNamespace(cell=0)
gradients = GradientReader(state)
torch.set_num_threads(1)
model = nn.Sequential(*[part for _ in range(8) for part in (nn.Linear(64, 64), nn.ReLU())])
parameters, seen, over = list(model.parameters()), set(), threading.Event()
main, looks = threading.main_thread(), [0]

def count(found):
    assert threading.current_thread() is main or state.cell is None
    return sum(gradient is not None for gradient in found)

def look():
    while not over.wait(0.0005):
        seen.add(gradients.read("all", parameters, count, default=-1))
        looks[0] += 1

def wait_for_a_look():
    position = looks[0]  # two more have ended: the second has begun after now
    while looks[0] < position + 2:
        time.sleep(0.001)

gradients._jobs.append(lambda: None)  # which the main thread never comes to
first = threading.Thread(target=lambda: seen.add(gradients.read("all", parameters, count, default=-1)))
first.start()
first.join()
assert seen == {-1}
gradients._jobs.clear()
looking = threading.Thread(target=look)
looking.start()
optimizer, x, steps = torch.optim.Adam(parameters), torch.randn(8, 64), 0
while steps < 200 or 16 not in seen:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    steps += 1
state.cell = None
wait_for_a_look()  # the one before may still tell what was
seen.clear()
wait_for_a_look()
over.set()
looking.join()
print(sorted(seen))
"""


@pytest.fixture
def abort() -> AbortFlag:
    return AbortFlag()


@pytest.fixture
def fenced(abort: AbortFlag) -> Iterator[torch.optim.Optimizer]:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    remove = creation.install_fence(abort)
    yield torch.optim.SGD([parameter], lr=1.0)
    remove()


def test_step_is_refused_while_abort_flag_is_set(fenced: torch.optim.Optimizer, abort: AbortFlag) -> None:
    fenced.step()
    (parameter,) = fenced.param_groups[0]["params"]
    assert parameter.tolist() == [0.0, 0.0]
    abort.set()
    with pytest.raises(AbortedError, match=r"aborted before optimizer.step"):
        fenced.step()
    assert parameter.tolist() == [0.0, 0.0]
    abort.clear(broken="rank 1 is dead")  # groups are broken: a step needs none
    fenced.step()
    assert parameter.tolist() == [-1.0, -1.0]


def test_pre_step_wait_ends_with_work_or_abort(abort: AbortFlag) -> None:
    looks = iter([False, False, True])
    creation.poll_until(lambda: next(looks), abort)
    threading.Timer(0.2, abort.set).start()
    with pytest.raises(AbortedError):
        creation.poll_until(lambda: False, abort)


def test_wrappers_are_registered_on_creation(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=150, check=False)
    assert done.stdout == "all held\n", done.stderr


def test_reading_gradients_during_backward_is_safe() -> None:
    """Read without care, `.grad` ends this process within a second or two (torch 2.13)."""
    done = run_code(TRAIN)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[16]\n"


INTERRUPTED = """
import os, signal, threading, types
from axon_nb.engine.inspection.memory import GradientReader

state = types.SimpleNamespace(cell=0)
gradients = GradientReader(state)
main, landed, heard = threading.main_thread(), [], 0

def on_interrupt(number, frame):
    if gradients.defers_interrupt(frame):
        landed.append(frame)
    else:
        raise KeyboardInterrupt

def make(found):
    assert threading.current_thread() is main
    os.kill(os.getpid(), signal.SIGINT)
    return sum(range(100))

signal.signal(signal.SIGINT, on_interrupt)
def ask(number):
    while len(begun) <= number:
        pass
    gradients.read(number, [], make, default=None)

begun = []
for number in range(30):
    asking = threading.Thread(target=ask, args=(number,))
    asking.start()
    try:
        begun.append(number)
        while True:
            pass
    except KeyboardInterrupt:
        heard += 1
    asking.join()
print(heard, len(landed))
"""


def test_interrupt_during_inspection_is_not_lost() -> None:
    done = run_code(INTERRUPTED)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "30 30\n", done.stderr
    assert "ignored" not in done.stderr
