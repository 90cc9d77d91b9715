"""What torch itself brings, used in cells as its documentation has it: compile, checkpoint, profiler."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.kernel import Kernel

TRAIN = """%%distributed
from torch.nn.parallel import DistributedDataParallel as DDP

mine = slice(rank * 16, rank * 16 + 16)

def steps_of(model, number, broken=False):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(number):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x[mine]), y[mine])
        if broken and rank == 1:
            raise ValueError("bug")
        loss.backward()
        optimizer.step()

wanted = trained_alone(lambda p: torch.optim.SGD(p, lr=0.1), [(x, y)] * 4)
"""


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_model_trains_all_ranks(two: Kernel, backend: str) -> None:
    two.ok(TRAIN)
    two.ok(
        f"%%distributed\nmodel = torch.compile(DDP(net()), backend={backend!r})\nsteps_of(model, 2)",
    )
    reply = two.run("%%distributed\nsteps_of(model, 1, broken=True)")
    assert "ValueError: bug" in reply.traceback
    two.ok(
        "%%distributed\nsteps_of(model, 2)\nbetween, off, moved = apart(flat(model), wanted)\n"
        "assert between == 0 and off < 1e-6 < 0.01 < moved, (between, off, moved)"
    )


def test_checkpoint_of_two_ranks_loads_in_one_process(two: Kernel, tmp_path: Path) -> None:
    two.ok(TRAIN)
    two.ok(
        f"""%%distributed
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

model = fully_shard(net())
steps_of(model, 4)
folder = {str(tmp_path)!r}
dcp.save({{"model": get_model_state_dict(model)}}, checkpoint_id=folder + "/saved")
dcp.async_save({{"model": get_model_state_dict(model)}}, checkpoint_id=folder + "/later").result()

again = fully_shard(net())
for name in ("saved", "later"):
    state = {{"model": get_model_state_dict(again)}}
    dcp.load(state, checkpoint_id=f"{{folder}}/{{name}}")
    set_model_state_dict(again, state["model"])
    whole = torch.cat([p.full_tensor().double().flatten() for p in again.parameters()])
    between, off, _ = apart(whole, wanted)
    assert between == 0 and off < 1e-6, (name, between, off)

alone = {{"model": net().state_dict()}}
if rank == 1:
    dcp.load(alone, checkpoint_id=folder + "/saved", no_dist=True)
    assert (torch.cat([value.double().flatten() for value in alone["model"].values()]) - wanted).abs().max() < 1e-6
"""
    )


def test_profiler_writes_one_trace_per_rank(two: Kernel, tmp_path: Path) -> None:
    two.ok(TRAIN)
    profile = f"""%%distributed
from torch.profiler import ProfilerActivity, profile, record_function, schedule, tensorboard_trace_handler

model = DDP(net())
with profile(
    activities=[ProfilerActivity.CPU],
    schedule=schedule(wait=1, warmup=1, active=2),
    on_trace_ready=tensorboard_trace_handler({str(tmp_path / "log")!r}, worker_name=f"rank{{rank}}"),
) as profiler:
    for number in range(4):
        with record_function("training step"):
            steps_of(model, 1, broken=BROKEN)
        profiler.step()
"""
    reply = two.run(profile.replace("BROKEN", "number == 2"))
    assert "ValueError: bug" in reply.traceback
    two.ok(profile.replace("BROKEN", "False"))
    two.ok(
        f"%%distributed\nwith profile(activities=[ProfilerActivity.CPU]) as profiler:\n    steps_of(model, 1)\n"
        f"profiler.export_chrome_trace({str(tmp_path)!r} + f'/trace{{rank}}.json')"
    )
    for rank in (0, 1):
        logs = sorted((tmp_path / "log").glob(f"rank{rank}.*.pt.trace.json"), key=lambda path: path.stat().st_mtime)
        names = [event.get("name") for event in json.loads(logs[-1].read_text())["traceEvents"]]
        assert names.count("training step") >= 2
        events = json.loads((tmp_path / f"trace{rank}.json").read_text())["traceEvents"]
        names = {event.get("name") for event in events}
        assert "aten::addmm" in names
        assert names & {"shm:all_reduce", "gloo:all_reduce"}


def test_compiled_ddp_of_library_modules_is_named(two: Kernel) -> None:
    two.ok(TRAIN)
    sentence = "torch.compile(DDP(Sequential)) at line 2 compiles nothing, as torch skips modules of torch.nn there"
    assert sentence in two.ok("%%distributed\ncompiled = torch.compile(DDP(net()))").shown()
    reply = two.ok("""%%distributed
class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

compiled = torch.compile(DDP(Own())), DDP(torch.compile(net()))
""")
    assert "compiles nothing" not in reply.shown()
