"""Tools of torch on ranks, launched frameworks, and frameworks that are missing."""

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

LIGHTNING = """%%distributed
import logging, time
import lightning as L
from torch.utils.data import DataLoader, TensorDataset
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

class Net(L.LightningModule):
    def __init__(self, fail_at=None, pause_s=0.0):
        super().__init__()
        self.net, self.fail_at, self.pause_s = net().double(), fail_at, pause_s

    def training_step(self, batch, i):
        time.sleep(self.pause_s)
        if self.fail_at == (self.global_rank, i):
            raise ValueError("bad batch")
        if self.pause_s:
            print("step", i)
        return F.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

data = DataLoader(TensorDataset(x.double(), y.double()), batch_size=8)
quiet = dict(accelerator="cpu", devices=world_size, logger=False, enable_checkpointing=False,
             enable_model_summary=False, enable_progress_bar=False, use_distributed_sampler=True)
# Lightning's sampler for training shuffles; the whole set in one step has no order.
whole = DataLoader(TensorDataset(x.double(), y.double()), batch_size=16)
wanted = trained_alone(lambda p: torch.optim.SGD(p, lr=0.1), [(x.double(), y.double())] * 2)

def fitted(strategy):
    model, trainer = Net(), L.Trainer(strategy=strategy, max_epochs=1, **quiet)
    trainer.fit(model, whole)
    trainer.fit_loop.max_epochs = 2  # again, with the same trainer
    trainer.fit(model, whole)
    assert (trainer.world_size, trainer.global_rank, trainer.global_step) == (world_size, rank, 2)
    return apart(flat(model.net), wanted)
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


@pytest.mark.needs("lightning")
def test_lightning_trains_the_ranks_and_survives_failures(two: Kernel) -> None:
    two.ok(LIGHTNING)
    for strategy in ("ddp", "ddp_notebook", "ddp_spawn"):
        two.ok(
            f"%%distributed\nbetween, off, moved = fitted({strategy!r})\n"
            "assert between == 0 and off < 1e-9 < moved, (between, off, moved)"
        )
    failed = two.run("%%distributed\nL.Trainer(strategy='ddp', max_epochs=1, **quiet).fit(Net(fail_at=(1, 1)), data)")
    assert failed.traceback.startswith("[rank 1]")
    assert "ValueError: bad batch" in failed.traceback
    request = two.submit(
        "%%distributed\nslow = Net(pause_s=0.05)\nL.Trainer(strategy='ddp', max_epochs=9999, **quiet).fit(slow, data)"
    )
    two.wait_for_output(request, "step 1")
    two.interrupt()
    stopped = two.collect(request)
    assert stopped.traceback.startswith("KeyboardInterrupt: Ranks 0-1 stopped.")
    assert "SystemExit" not in stopped.traceback
    two.ok(
        "%%distributed\nassert (flat(slow.net) != flat(net())).any()\nbetween, off, _ = fitted('ddp')\n"
        "assert between == 0 and off < 1e-9"
    )


@pytest.mark.needs("lightning")
def test_fabric_launches_on_the_ranks(two: Kernel) -> None:
    two.ok(LIGHTNING)
    reply = two.ok(
        "%%distributed\nfabric = L.Fabric(accelerator='cpu', devices=world_size, strategy='ddp')\nfabric.launch()\n"
        "model = net().double()\nmodel, step = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "for _ in range(2):\n    for a, b in fabric.setup_dataloaders(whole):\n        step.zero_grad()\n"
        "        fabric.backward(F.mse_loss(model(a), b))\n        step.step()\n"
        "between, off, moved = apart(flat(model), wanted)\nassert between == 0 and off < 1e-9 < moved\n"
        "notebook = L.Fabric(accelerator='cpu', devices=world_size, strategy='ddp_notebook')\n"
        "notebook.launch(lambda fabric: (fabric.global_rank == rank, fabric.world_size))"
    )
    assert reply.lines()[-1] == "[ranks 0-1] (True, 2)"


@pytest.mark.needs("ignite")
@pytest.mark.parametrize(
    "start",
    [
        "idist.spawn('gloo', train, args=(3,), nproc_per_node=world_size)",
        "idist.Parallel(backend='gloo', nproc_per_node=world_size).__enter__().run(train, 3)",
        "with idist.Parallel(backend='gloo') as parallel: parallel.run(train, 3)",
    ],
)
def test_ignite_uses_the_ranks(two: Kernel, start: str) -> None:
    reply = two.ok(
        "%%distributed\nimport ignite.distributed as idist\ndef train(local_rank, scale):\n"
        "    sum_ = idist.all_reduce(torch.tensor(float(scale * (idist.get_rank() + 1))))\n"
        f"    print(local_rank == rank, idist.get_world_size(), float(sum_))\n{start}\n"
        "t = torch.ones(1); dist.all_reduce(t); t.item()"
    )
    assert "[ranks 0-1] True 2 9.0" in reply.lines()
    assert reply.lines()[-1] == "[ranks 0-1] 2.0"


def test_missing_package_is_reported_with_fix(two: Kernel) -> None:
    reply = two.run("%%distributed\nimport horovod.torch as hvd")
    assert "ModuleNotFoundError: No module named 'horovod'" in reply.traceback
    assert "`import axon_nb.compat.horovod as hvd`, which has its API." in reply.traceback.splitlines()[-1]
