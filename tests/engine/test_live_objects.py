"""Wrappers of models are known from their creation; in a separate process, as torch's classes are changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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

kinds = {"ddp": wrappers._DDP, "fsdp": wrappers._FSDP, "schedules": wrappers._SCHEDULES}
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


def test_wrappers_are_registered_on_creation(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=150, check=False)
    assert done.stdout == "all held\n", done.stderr
