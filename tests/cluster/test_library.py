"""`axon_nb.comm` and `axon_nb.parallel` on a cluster's ranks: attached to the existing group, recoverable."""

from __future__ import annotations

from tests.support.script import Script

COLLECTIVES = """
from axon_nb import comm
from axon_nb.comm import World
assert type(world) is World and world.rank() == rank
t = comm.all_reduce_mean(torch.tensor([float(rank)]))
g = comm.all_gather(torch.full((rank + 1,), rank), uneven=True)
group = world.new_group([1])
alone = comm.all_reduce_sum(torch.ones(1), group=group).item() if group.contains(rank) else None
(t.item(), g.tolist(), alone, str(world.backend), comm.World.init().world_size())
"""

MESH = """
from torch.distributed.device_mesh import init_device_mesh
m = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
(comm.all_reduce_sum(torch.ones(1), group=m.get_group("tp")).item(),
 comm.all_reduce_sum(torch.ones(1), group=m.get_group("dp")).item())
"""

TRAIN = """
from axon_nb.parallel import DDP, TopK, FP16
from axon_nb.comm import GradSyncStrategy
torch.manual_seed(rank)
model = DDP(torch.nn.Linear(4, 1), strategy=GradSyncStrategy.SYNCHRONOUS)
hook = model.register_hook(FP16(measure=True))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
def step(fail=False):
    opt.zero_grad()
    loss = model(torch.ones(2, 4) * (rank + 1)).square().mean()
    if fail and rank == 1:
        raise ValueError("half-way")
    loss.backward()
    opt.step()
step()
"""

SPANS = """
from axon_nb.records.spans import ring
before = ring.position
comm.all_reduce_sum(torch.ones(4))
[(s.name, s.bytes) for s in ring.since(before)[0] if s.kind == "collective"]
"""

COUNTED = """
import axon_nb
from axon_nb import comm
rows = torch.ones(3, 2, dtype=torch.float64, requires_grad=True)
with axon_nb.calls() as counted:
    comm.all_to_all(rows, send_sizes=[[2, 1], [0, 3]][rank], recv_sizes=[[2, 0], [1, 3]][rank]).sum().backward()
    dist.send(torch.ones(4), 1) if rank == 0 else dist.recv(torch.ones(4), 0)
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
with axon_nb.calls() as step:
    ddp(torch.ones(1, 3)).sum().backward()
torch.equal(rows.grad, torch.ones_like(rows)), [tuple(r) for r in counted.rows[:2]], [tuple(r) for r in step.rows]
"""


def test_collectives_use_the_existing_group(script: Script) -> None:
    values = script.value(f"dict(c.run({COLLECTIVES!r}).values)")
    assert values == {0: (0.5, [0, 1, 1], None, "gloo", 2), 1: (0.5, [0, 1, 1], 1.0, "gloo", 2)}
    assert script.value(f"dict(c.run({MESH!r}).values)") == {0: (2.0, 1.0), 1: (2.0, 1.0)}


def test_calls_of_a_block_are_counted_and_rows_are_exchanged_with_gradients(script: Script) -> None:
    zero, one = script.value(f"dict(c.run({COUNTED!r}).values)").values()
    reduced = [("all_reduce", -1, 1, 16, 16)]
    assert zero == (True, [("all_to_all", -1, 2, 80, 16), ("send", 1, 1, 16, 16)], reduced)
    assert one == (True, [("all_to_all", -1, 2, 112, 16), ("recv", 0, 1, 16, 0)], reduced)


def test_each_call_is_one_span(script: Script) -> None:
    script.ok("c.run('from axon_nb import comm', quiet=True)")
    assert script.value(f"dict(c.run({SPANS!r}).values)") == {0: [("allreduce", 16)], 1: [("allreduce", 16)]}


def test_model_with_comm_hook_continues_after_failed_step(script: Script) -> None:
    script.ok(f"c.run({TRAIN!r}, quiet=True)")
    answer = script.run("c.run('step(fail=True)')")
    assert answer.message == "rank 1: ValueError: half-way"
    script.ok("c.run('step()')")
    cell = "([p.detach().flatten().tolist() for p in model.parameters()], hook.stats.buckets)"
    values = script.value(f"dict(c.run({cell!r}).values)")
    assert values[0][0] == values[1][0]
    assert values[0][1] >= 2


def test_destroy_and_close_keep_the_group_for_later_cells(script: Script) -> None:
    script.ok("c.run('from axon_nb import comm\\nworld.close()')")
    assert script.value("dict(c.run('comm.all_reduce_sum(torch.ones(1)).item()').values)") == {0: 2.0, 1: 2.0}
