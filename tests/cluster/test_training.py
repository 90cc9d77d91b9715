"""Training with `axon_nb.comm` and `axon_nb.parallel` on a cluster's ranks, also after an abort or a lost rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.script import Script
from tests.support.training.training_steps import CASES

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

PREPARE_DDP = """
from axon_nb.parallel import DDP, TopK
torch.manual_seed(0)
layers = [torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4)]
model = DDP(torch.nn.Sequential(*layers), bucket_size_mb=0.0001)
hook = model.register_hook(TopK(0.5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
def step():
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
for _ in range(3):
    step()
"""
SUMS = """
for _ in range(2):
    step()
[sum(p.sum().item() for p in model.parameters()), hook is model._comm_hooks[0][1]]
"""

PREPARE_SPLIT = """
from axon_nb.parallel import parallel_cross_entropy, parallelize
from axon_nb.parallel.models import GPT, GPTConfig
torch.manual_seed(rank)
model = GPT(GPTConfig(vocab=32, context=8, hidden=16, heads=4, blocks=2))
report = parallelize(model, "auto", sequence=True, parallel_loss=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
drawn = torch.randint(32, (3, 9), generator=torch.Generator().manual_seed(5))
def step(fail=False):
    optimizer.zero_grad()
    loss = parallel_cross_entropy(model(drawn[:, :-1]), drawn[:, 1:])
    if fail and rank == 1:
        raise RuntimeError("late")
    loss.backward()
    optimizer.step()
    return loss.item()
[step() for _ in range(2)]
"""

PREPARE_SAVING = """
from axon_nb.parallel import DDP
from axon_nb.parallel.checkpoint import Checkpoints
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
checkpoints = Checkpoints({folder!r})
def step():
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
step()
checkpoints.save(1, model=model, optimizer=optimizer)
"""
SAVE = "checkpoints.{how}({step}, model=model, optimizer=optimizer)"
RESUMED = """
resumed = checkpoints.load_latest(model=model, optimizer=optimizer)
step()
[resumed.step, sum(p.sum().item() for p in model.parameters()), checkpoints.steps()]
"""

RECORD = """
from axon_nb import plan
from axon_nb.records import spans as trace
from tests.support.training.training_steps import prepare
prepared = prepare({name!r})
position = trace.ring.position
prepared.step()
spans = trace.ring.since(position)[0]
prepared.pp_rank, plan.recorded_communication(spans, prepared.mesh)
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


def fails(script: Script, code: str) -> str:
    """What is said about a cell that fails on rank 1 while rank 0 is in a step."""
    answer = script.run(f"c.run({code!r}, quiet=True)")
    assert "CellError" in answer.kinds
    return answer.message


def test_hooks_survive_an_abort_and_a_replaced_rank(script: Script) -> None:
    script.ok(f"c.run({PREPARE_DDP!r}, quiet=True)")
    assert "RuntimeError: late" in fails(script, "if rank == 1: raise RuntimeError('late')\nstep()")
    after_abort = script.value(f"c.run({SUMS!r}, quiet=True).values")
    assert after_abort[0] == after_abort[1]
    assert "SIGKILL" in fails(script, "import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\nstep()")
    script.ok("c.repair(from_rank=0)")
    repaired = script.value(f"c.run({SUMS!r}, quiet=True).values")
    assert repaired[0] == repaired[1]
    assert repaired[0][1] is True


def test_rerun_of_aborted_step_gives_the_same_result(script: Script) -> None:
    script.ok(f"c.run({PREPARE_SPLIT!r}, quiet=True)")
    expected = script.value("c.run('[step() for _ in range(2)]', quiet=True).values")
    assert expected[0] == expected[1]
    script.ok(f"c.run({PREPARE_SPLIT!r}, quiet=True)")
    answer = script.run("c.run('step(fail=True)', quiet=True)")
    assert "CellError" in answer.kinds
    assert "RuntimeError: late" in answer.message
    assert script.value("c.run('[step() for _ in range(2)]', quiet=True).values") == expected


def run(script: Script, code: str) -> str:
    """What is said about a cell."""
    return script.run(f"c.run({code!r}, quiet=True)").message


def test_aborted_save_keeps_the_previous_checkpoint(script: Script, tmp_path: Path) -> None:
    script.ok(f"c.run({PREPARE_SAVING.format(folder=str(tmp_path))!r}, quiet=True)")
    for step, how in ((2, "save"), (3, "async_save")):
        # Rank 0 waits in the save for rank 1, which never comes.
        code = f"if rank == 1: raise RuntimeError('late')\n{SAVE.format(how=how, step=step)}"
        assert "RuntimeError: late" in run(script, code)
    first = script.value(f"c.run({RESUMED!r}, quiet=True).values")
    assert first[0][0] == 1
    assert first[0] == first[1]
    script.ok(f"c.run({SAVE.format(how='async_save', step=4)!r}, quiet=True)")
    script.ok("c.run('checkpoints.wait()', quiet=True)")
    again = script.value(f"c.run({RESUMED!r}, quiet=True).values")
    assert again[0][0] == 4
    assert again[0] == again[1]
    assert again[0][2] == [1, 4]
    assert sorted(item.name for item in tmp_path.iterdir()) == ["step_00000001", "step_00000004"]


def test_rank_death_during_background_save(script: Script, tmp_path: Path) -> None:
    script.ok(f"c.run({PREPARE_SAVING.format(folder=str(tmp_path))!r}, quiet=True)")
    dying = "import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()"
    assert "SIGKILL" in run(script, f"{SAVE.format(how='async_save', step=2)}\n{dying}")
    script.ok("c.repair(from_rank=0)")
    reported = run(script, SAVE.format(how="save", step=3))
    if reported:  # it was not fast enough
        assert "The background save of step 2 failed: rank 1 was replaced and did not take part" in reported
        script.ok(f"c.run({SAVE.format(how='save', step=3)!r}, quiet=True)")
    resumed = script.value(f"c.run({RESUMED!r}, quiet=True).values")
    assert resumed[0] == resumed[1]
    assert resumed[0][2] == ([1, 3] if reported else [1, 2, 3])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.ranks == 2])
def test_calls_and_bytes_match_gloo_ranks(script: Script, name: str) -> None:
    expected = CASES[name].plan()
    values = script.value(f"c.run({RECORD.format(name=name)!r}, quiet=True).values")
    assert set(values) == {0, 1}
    for pp_rank, operations in values.values():
        assert operations == expected.by_operation(pp_rank=pp_rank)


def test_calibration_from_the_notebook(script: Script) -> None:
    code = (
        "from axon_nb import plan\n"
        "here = plan.calibrate(cluster=c, sizes=(4096, 65536), repeats=1)\n"
        "assert plan.communication(lambda: __import__('torch').nn.Linear(64, 64), 2, links=here).seconds() > 0\n"
        "sorted(here.links), here.where"
    )
    links, where = script.value(code)
    assert links == ["all"]
    assert where.startswith("2 ranks, gloo, cpu")
