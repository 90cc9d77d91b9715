"""`%shards` in a notebook, and placements that programs declare."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.kernel import FreshCluster, Kernel

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
ASK = """import json
from msgspec import to_builtins
from axon_nb.cluster.session import current
from axon_nb.cluster.inspection.variables import LayoutRequest
shards, notes = LayoutRequest(current.require("test").state, {names!r}, gradients={gradients}).send()
print(json.dumps([[to_builtins(shard) for shard in shards], notes]))"""

SHARDED = """%%distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from axon_nb.parallel import declare_placements
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
class RowLinear(nn.Module):
    def __init__(self):
        super().__init__()
        weight = nn.Parameter(torch.full((8, 16 // world_size), float(rank)))
        self.weight = declare_placements(weight, mesh, [Shard(1)])
        self.bias = nn.Parameter(torch.zeros(8))
    def forward(self, x):
        y = x.chunk(world_size, 1)[rank] @ self.weight.T
        return torch.distributed.nn.functional.all_reduce(y) + self.bias
linear = RowLinear()
optimizer = torch.optim.Adam(linear.parameters(), 1e-3)
linear(torch.ones(2, 16)).sum().backward()
optimizer.step()
cache = declare_placements(torch.zeros(3, 4), mesh, [Shard(0)])
plain = torch.zeros(3)
"""
READ = """from axon_nb.cluster.session import current
from axon_nb.cluster.inspection.variables import LayoutRequest
for shard in sorted(LayoutRequest(current.require("test").state, {names!r}, gradients=True).send()[0], key=str):
    print(shard.rank, shard.name, shard.role, *map(tuple, (shard.global_shape, shard.offset, shard.placements)))"""


@pytest.fixture(scope="module")
def ready(shared_kernel: Kernel) -> Kernel:
    shared_kernel.ok(SETUP)
    return shared_kernel


def ask(kernel: Kernel, *names: str, gradients: bool = False) -> dict[tuple[str, str, int], dict[str, Any]]:
    reply = kernel.ok(ASK.format(names=list(names), gradients=gradients))
    shards, notes = json.loads(reply.stdout)
    assert notes == []
    return {(shard["role"], shard["name"], shard["rank"]): shard for shard in shards}


def test_fsdp_shards_have_offsets_and_padding(ready: Kernel) -> None:
    found = ask(ready, "sharded", gradients=True)
    offsets = [found["parameter", "0.weight", rank]["offset"] for rank in range(4)]
    assert offsets == [[0, 0], [2, 0], [4, 0], [6, 0]]
    last = found["parameter", "0.weight", 3]
    assert (last["local_shape"], last["bytes"], last["padding"]) == ([0, 10], 80, 80)
    assert last["placements"] == ["Shard(0)"]
    assert ("gradient", "2.bias", 0) in found


def test_optimizer_state_is_named_by_parameter(ready: Kernel) -> None:
    found = ask(ready, "optimizer")
    state = found["optimizer", "0.weight: exp_avg", 1]
    assert (state["global_shape"], state["offset"], state["placements"]) == ([6, 10], [2, 0], ["Shard(0)"])


def test_replicas_are_distinguished_from_per_rank_values(ready: Kernel) -> None:
    found = ask(ready, "copied", "own")
    assert found["parameter", "module.weight", 2]["placements"] == ["Replicate()"]
    assert [found["tensor", "own", rank]["global_shape"] for rank in range(4)] == [[1], [2], [3], [4]]
    assert found["tensor", "own", 0]["placements"] == []


def test_two_axes_cut_one_tensor(ready: Kernel) -> None:
    found = ask(ready, "both")
    assert [found["parameter", "1.weight", rank]["offset"] for rank in range(4)] == [[0, 0], [0, 4], [4, 0], [4, 4]]
    assert found["parameter", "1.weight", 3]["axes"] == ["dp", "tp"]
    assert found["parameter", "0.weight", 3]["local_shape"] == [2, 8]


def test_items_of_collections_and_modules_can_be_named(ready: Kernel) -> None:
    assert ask(ready, "summands")["tensor", "total", 0]["placements"] == ["Partial(sum)"]
    assert ask(ready, "both[1].weight")["tensor", "both[1].weight", 3]["offset"] == [4, 4]


def test_gather_is_visible(ready: Kernel) -> None:
    ready.ok("%%distributed\nsharded[0].unshard()")
    found = ask(ready, "sharded")
    assert found["parameter", "0.weight", 1]["local_shape"] == [6, 10]
    assert found["parameter", "0.weight", 1]["gathered"] is True
    assert found["parameter", "2.weight", 1]["gathered"] is False
    ready.ok("%%distributed\nsharded[0].reshard()")
    assert ask(ready, "sharded")["parameter", "0.weight", 1]["local_shape"] == [2, 10]


def test_busy_ranks_report_shards(ready: Kernel) -> None:
    busy = "%%distributed --noblock --out job\nimport time\nend = time.time() + 3\nwhile time.time() < end: pass"
    ready.ok(busy)
    assert ask(ready, "copied")["parameter", "module.weight", 0]["local_shape"] == [4, 4]
    ready.ok("_ = job.result()")


def test_unavailable_view_is_explained_in_one_sentence(ready: Kernel) -> None:
    for name, words in {
        "sharded.nothing": "has no attribute 'nothing'",
        "f(x)": "must be a variable, optionally with .attributes and [indices]",
    }.items():
        reply = ready.run(f"%shards {name}")
        assert reply.ename == "UsageError"
        assert words in reply.traceback
    ready.ok("%%rank 2\nmine = torch.ones(2)")
    reply = ready.ok(ASK.format(names=["mine"], gradients=False))
    shards, notes = json.loads(reply.stdout)
    assert [shard["rank"] for shard in shards] == [2]
    assert notes == ["Ranks 0-1,3: variable 'mine' does not exist."]


LAYERS = """%%distributed
import functools
from axon_nb.parallel import ColumnParallelLinear, FSDP, Parallel3D, RowParallelLinear, ShardingStrategy, make_mesh
from axon_nb.parallel import TensorParallelBlock
from axon_nb.parallel.models import GPT, Block, GPTConfig
torch.manual_seed(0)
t_grid = make_mesh(dp=2, tp=2)
t_block = TensorParallelBlock(8, 4, group=t_grid["tp"])
t_block_steps = torch.optim.Adam(t_block.parameters())
t_block(torch.randn(2, 3, 8)).sum().backward()
t_block_steps.step()
t_copied = nn.parallel.DistributedDataParallel(
    nn.Sequential(ColumnParallelLinear(4, 8, group=t_grid["tp"])), process_group=t_grid["dp"].get_group()
)
t_both = nn.Sequential(ColumnParallelLinear(4, 8, group=t_grid["tp"]), RowParallelLinear(8, 6, group=t_grid["tp"]))
_ = fully_shard(t_both, mesh=t_grid["dp"])
t_both_steps = torch.optim.SGD(t_both.parameters(), lr=0.1, momentum=0.9)
t_both(torch.randn(2, 4)).sum().backward()
t_both_steps.step()
t_hybrid = FSDP(nn.Linear(6, 5), strategy=ShardingStrategy.HYBRID_SHARD, mesh=make_mesh(replicate=2, shard=2))
t_hybrid_steps = t_hybrid.optimizer(torch.optim.Adam)
t_hybrid(torch.randn(2, 6)).sum().backward()
t_hybrid_steps.step()
t_zero = FSDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), strategy=ShardingStrategy.OPTIMIZER_STATE)
t_zero_steps = t_zero.optimizer(torch.optim.Adam)
t_zero(torch.randn(2, 4)).sum().backward()
t_zero_steps.step()
t_styles = {"block*.up": ColwiseParallel(), "block*.down": RowwiseParallel()}
t_three = Parallel3D(
    GPT(GPTConfig(blocks=2)), make_mesh(pp=2, tp=2), tp_plan=t_styles, num_microbatches=2,
    loss=nn.functional.mse_loss,
)
t_piped = Parallel3D(GPT(GPTConfig(blocks=2)), make_mesh(pp=2, dp=2), num_microbatches=2)
"""


@pytest.fixture(scope="module")
def layers(ready: Kernel) -> Kernel:
    ready.ok(LAYERS)
    return ready


def offsets(found: dict[tuple[str, str, int], dict[str, Any]], role: str, name: str) -> list[list[int]]:
    """Where the part of each rank begins."""
    return [found[role, name, rank]["offset"] for rank in range(4)]


def test_hand_written_layers_report_their_slices(layers: Kernel) -> None:
    found = ask(layers, "t_block", gradients=True)
    for role in ("parameter", "gradient"):
        up = found[role, "mlp.up.weight", 3]
        assert (up["global_shape"], up["local_shape"], up["placements"]) == ([32, 8], [16, 8], ["Shard(0)"])
        assert (up["axes"], up["mesh_shape"], up["coordinates"]) == (["tp"], [2], [1])
        assert offsets(found, role, "mlp.up.weight") == [[0, 0], [16, 0], [0, 0], [16, 0]]
        assert offsets(found, role, "mlp.down.weight") == [[0, 0], [0, 16], [0, 0], [0, 16]]
        assert offsets(found, role, "attention.query.bias") == [[0], [4], [0], [4]]
    assert found["parameter", "attention.out.weight", 1]["placements"] == ["Shard(1)"]
    for whole in ("attention.out.bias", "norm_1.weight"):
        assert found["parameter", whole, 1]["placements"] == ["Replicate()"]
        assert found["parameter", whole, 1]["offset"] == [0]
    states = ask(layers, "t_block_steps")
    assert offsets(states, "optimizer", "mlp.down.weight: exp_avg") == [[0, 0], [0, 16], [0, 0], [0, 16]]
    assert states["optimizer", "mlp.down.weight: exp_avg", 1]["global_shape"] == [8, 32]
    assert states["optimizer", "mlp.down.weight: step", 1]["placements"] == []
    alone = ask(layers, "t_block.mlp.down.weight", gradients=True)
    for role in ("tensor", "gradient"):
        assert alone[role, "t_block.mlp.down.weight", 1]["offset"] == [0, 16]


def test_hand_written_layers_within_ddp_and_fsdp(layers: Kernel) -> None:
    copied = ask(layers, "t_copied")["parameter", "module.0.weight", 3]
    assert (copied["placements"], copied["axes"]) == (["Replicate()", "Shard(0)"], ["replica", "tp"])
    assert copied["offset"] == [4, 0]
    found = ask(layers, "t_both", "t_both_steps", gradients=True)
    for role, name in (("parameter", "0.weight"), ("gradient", "0.weight"), ("optimizer", "0.weight: momentum_buffer")):
        own = found[role, name, 3]
        assert (own["placements"], own["axes"]) == (["Shard(0)", "Shard(0)"], ["dp", "tp"]), role
        assert (own["global_shape"], own["local_shape"]) == ([8, 4], [2, 4])
        # Ranks 0 and 1 have the first half of their part of the layer, 2 and 3 the second.
        assert offsets(found, role, name) == [[0, 0], [4, 0], [2, 0], [6, 0]]
    row = found["parameter", "1.weight", 3]
    assert (row["offset"], row["global_shape"]) == ([3, 4], [6, 8])
    layers.ok("%%distributed\nt_both.unshard()")
    whole = ask(layers, "t_both")["parameter", "0.weight", 3]
    assert (whole["gathered"], whole["local_shape"], whole["offset"]) == (True, [4, 4], [4, 0])
    layers.ok("%%distributed\nt_both.reshard()")


def test_hybrid_shards_have_copies_gradients_and_states(layers: Kernel) -> None:
    found = ask(layers, "t_hybrid", "t_hybrid_steps", gradients=True)
    for role, name in (("parameter", "module.weight"), ("gradient", "module.weight")):
        own = found[role, name, 3]
        assert (own["placements"], own["mesh_shape"]) == (["Replicate()", "Shard(0)"], [2, 2])
        assert offsets(found, role, name) == [[0, 0], [3, 0], [0, 0], [3, 0]]
    assert found["parameter", "module.weight", 1]["padding"] == 4 * 6, "3 rows and 2: the smaller part is padded"
    state = found["optimizer", "module.weight: exp_avg", 2]
    assert (state["placements"], state["offset"]) == (["Replicate()", "Shard(0)"], [0, 0])


def test_zero_optimizer_states_are_on_one_rank_each(layers: Kernel) -> None:
    found = ask(layers, "t_zero", "t_zero_steps", gradients=True)
    assert found["parameter", "module.0.weight", 2]["placements"] == ["Replicate()"]
    holders = [rank for role, name, rank in found if (role, name) == ("optimizer", "module.0.weight: exp_avg")]
    assert len(holders) == 1
    assert found["optimizer", "module.0.weight: exp_avg", holders[0]]["placements"] == []


def test_stages_of_three_dimensions(layers: Kernel) -> None:
    found = ask(layers, "t_three")
    up = {rank: found["parameter", "block0.up.weight", rank] for rank in (0, 1)}
    assert [own["offset"] for own in up.values()] == [[0, 0], [128, 0]]
    assert ("parameter", "block0.up.weight", 2) not in found, "that is of another stage"
    assert ("parameter", "head.norm.weight", 3) in found
    piped = ask(layers, "t_piped")
    assert piped["parameter", "head.norm.weight", 3]["placements"] == ["Shard(0)"]


def test_unchanged_shards_are_not_resent(ready: Kernel) -> None:
    ready.ok(
        "from axon_nb.cluster.session import current\nfrom axon_nb.cluster.inspection.variables import LayoutRequest\n"
        "t_asked = LayoutRequest(current.require('test').state, ['sharded'])\nt_first = t_asked.send()"
    )
    asked = "t_again = t_asked.send()\n(t_again == t_first, t_asked.has_changed, t_asked.cost_s > 0)"
    assert ready.ok(asked).result == "(True, False, True)"
    ready.ok("%%distributed --quiet\nsharded[0].unshard()\nsharded[0].reshard()\nown = torch.zeros(9)")
    assert ready.ok(asked).result == "(True, False, True)"
    ready.ok("%%distributed --quiet\nsharded.register_buffer('t_more', torch.zeros(2))")
    assert ready.ok(asked).result == "(False, True, True)"
    ready.ok("%%distributed --quiet\ndel sharded.t_more")


def test_hand_sharded_layer_is_drawn_and_its_lost_parts_are_named(fresh_cluster: FreshCluster) -> None:
    kernel = fresh_cluster(2)
    kernel.ok(SHARDED)
    lines = kernel.ok(READ.format(names=["linear", "optimizer", "cache"])).lines()
    for rank in (0, 1):
        for name, role in (("weight", "parameter"), ("weight", "gradient"), ("weight: exp_avg", "optimizer")):
            assert f"{rank} {name} {role} (8, 16) (0, {8 * rank}) ('Shard(1)',)" in lines
        assert f"{rank} cache tensor (6, 4) ({3 * rank}, 0) ('Shard(0)',)" in lines
        assert f"{rank} bias parameter (8,) (0,) ()" in lines
    assert "Shard(1)" in kernel.ok("%distributed vars").result
    kernel.run("%%distributed\nimport os\nif rank == 1: os._exit(3)\ndist.barrier()")
    lines = kernel.ok("%distributed repair --from 0").lines()
    assert "Not copied: `linear` is sharded: each rank holds its own part." in lines
    # 8 x 8 numbers of 4 bytes; Adam has two of each, and no part of its step counters or of the bias.
    assert lines[-1].startswith("Only rank 1 held its part of `linear` (1 of 2 parameters, 256 B)")
    assert "`optimizer` (2 of 6 state tensors, 512 B)" in lines[-1]
    assert "`cache` (48 B)" in lines[-1]
    assert "plain" not in lines[-1]
    assert kernel.ok("%%distributed --ranks 1\nplain.shape").lines() == ["[rank 1] torch.Size([3])"]
