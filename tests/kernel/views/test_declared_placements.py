"""A model that is sharded by hand, in plain tensors: its placements are drawn, and its lost parts are named."""

from __future__ import annotations

from tests.support.kernel import FreshCluster

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
from axon_nb.cluster.inspection.variables import request_layouts
for shard in sorted(request_layouts(current.require("test").state, {names!r}, gradients=True)[0], key=str):
    print(shard.rank, shard.name, shard.role, *map(tuple, (shard.global_shape, shard.offset, shard.placements)))"""


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
