"""Lightning and Ignite in cells, as written for torchrun or for a notebook: they train the ranks of the cell."""

from __future__ import annotations

import pytest

from tests.support.kernel import Kernel

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
