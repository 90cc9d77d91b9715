"""Which rank holds what, asked of real ranks: FSDP2 with padding, DDP, tensor parallelism, optimizers, a gather."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.kernel.driver import Kernel

SETUP = """%%distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
torch.manual_seed(0)
sharded = nn.Sequential(nn.Linear(10, 6), nn.ReLU(), nn.Linear(6, 3))
for layer in (sharded[0], sharded[2]):
    fully_shard(layer)
fully_shard(sharded)
optimizer = torch.optim.Adam(sharded.parameters())
sharded(torch.randn(4, 10)).sum().backward()
optimizer.step()
copied = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
both = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
parallelize_module(both, grid["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
_ = fully_shard(both, mesh=grid["dp"])
summands = {"total": DTensor.from_local(torch.ones(3), grid["tp"], [Partial()])}
own = torch.zeros(rank + 1)
"""
ASK = """import dataclasses, json
from axon_nb.cluster import current
from axon_nb.cluster.layouts import ask_layouts
shards, notes = ask_layouts(current.require("test"), {names!r}, gradients={gradients})
print(json.dumps([[dataclasses.asdict(shard) for shard in shards], notes]))"""


@pytest.fixture(scope="module")
def ready(shared_kernel: Kernel) -> Kernel:
    shared_kernel.ok(SETUP)
    return shared_kernel


def ask(kernel: Kernel, *names: str, gradients: bool = False) -> dict[tuple[str, str, int], dict[str, Any]]:
    reply = kernel.ok(ASK.format(names=list(names), gradients=gradients))
    shards, notes = json.loads(reply.stdout)
    assert notes == []
    return {(shard["role"], shard["name"], shard["rank"]): shard for shard in shards}


def test_fsdp_shards_say_where_they_begin_and_what_is_padding(ready: Kernel) -> None:
    found = ask(ready, "sharded", gradients=True)
    offsets = [found["parameter", "0.weight", rank]["offset"] for rank in range(4)]
    assert offsets == [[0, 0], [2, 0], [4, 0], [6, 0]]
    last = found["parameter", "0.weight", 3]
    assert (last["local_shape"], last["bytes"], last["padding"]) == ([0, 10], 80, 80)
    assert last["placements"] == ["Shard(0)"]
    assert ("gradient", "2.bias", 0) in found


def test_an_optimizers_state_has_the_names_of_the_parameters(ready: Kernel) -> None:
    found = ask(ready, "optimizer")
    state = found["optimizer", "0.weight: exp_avg", 1]
    assert (state["global_shape"], state["offset"], state["placements"]) == ([6, 10], [2, 0], ["Shard(0)"])


def test_copies_are_told_from_each_ranks_own(ready: Kernel) -> None:
    found = ask(ready, "copied", "own")
    assert found["parameter", "module.weight", 2]["placements"] == ["Replicate()"]
    assert [found["tensor", "own", rank]["global_shape"] for rank in range(4)] == [[1], [2], [3], [4]]
    assert found["tensor", "own", 0]["placements"] == []


def test_two_axes_cut_one_tensor(ready: Kernel) -> None:
    found = ask(ready, "both")
    assert [found["parameter", "1.weight", rank]["offset"] for rank in range(4)] == [[0, 0], [0, 4], [4, 0], [4, 4]]
    assert found["parameter", "1.weight", 3]["axes"] == ["dp", "tp"]
    assert found["parameter", "0.weight", 3]["local_shape"] == [2, 8]


def test_parts_of_collections_and_of_modules_can_be_named(ready: Kernel) -> None:
    assert ask(ready, "summands")["tensor", "total", 0]["placements"] == ["Partial(sum)"]
    assert ask(ready, "both[1].weight")["tensor", "both[1].weight", 3]["offset"] == [4, 4]


def test_a_gather_is_seen(ready: Kernel) -> None:
    ready.ok("%%distributed\nsharded[0].unshard()")
    found = ask(ready, "sharded")
    assert found["parameter", "0.weight", 1]["local_shape"] == [6, 10]
    assert found["parameter", "0.weight", 1]["gathered"] is True
    assert found["parameter", "2.weight", 1]["gathered"] is False
    ready.ok("%%distributed\nsharded[0].reshard()")
    assert ask(ready, "sharded")["parameter", "0.weight", 1]["local_shape"] == [2, 10]


def test_ranks_answer_while_they_run_a_cell(ready: Kernel) -> None:
    busy = "%%distributed --noblock --out job\nimport time\nend = time.time() + 3\nwhile time.time() < end: pass"
    ready.ok(busy)
    assert ask(ready, "copied")["parameter", "module.weight", 0]["local_shape"] == [4, 4]
    ready.ok("_ = job.result()")


def test_what_cannot_be_shown_is_told_in_a_sentence(ready: Kernel) -> None:
    for name, words in {
        "nothing": "there is no variable 'nothing'",
        "rank": "'rank' is a int that holds no tensor",
        "sharded.nothing": "has no attribute 'nothing'",
        "f(x)": "a variable, with .attributes and [indices] behind it, can be shown",
    }.items():
        reply = ready.run(f"%shards {name}")
        assert reply.ename == "UsageError"
        assert words in reply.traceback
    ready.ok("%%rank 2\nmine = torch.ones(2)")
    reply = ready.ok(ASK.format(names=["mine"], gradients=False))
    shards, notes = json.loads(reply.stdout)
    assert [shard["rank"] for shard in shards] == [2]
    assert notes == ["Rank 0-1,3: there is no variable 'mine'."]


def test_hooks_are_there(ready: Kernel) -> None:
    code = "%%rank 0\nfrom axon_nb.engine import gathered, placed\nprint(gathered.missing(), placed.missing())"
    assert ready.ok(code).lines() == ["[rank 0] [] []"]
