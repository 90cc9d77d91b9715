"""Each kind of work once: four ranks on one card over Gloo, and one rank on NCCL. Without a GPU the ranks use CPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import until
from tests.support.script import Script

CARD = Path("/dev/nvidiactl").exists()
RANKS = 4

DDP = """
torch.manual_seed(rank)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8).to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
def step(fail=None):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8, device=device)).square().mean()
    if rank == fail:
        raise ValueError("as planned")
    loss.backward()
    optimizer.step()
    return model.module.weight.sum().item()
step()
"""
FSDP2 = """
from torch.distributed.fsdp import fully_shard
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8)).to(device)
for layer in (net[0], net[2]):
    fully_shard(layer)
fully_shard(net)
sgd = torch.optim.SGD(net.parameters(), lr=0.1)
net(torch.ones(4, 8, device=device)).square().mean().backward()
sgd.step()
weight = net[0].weight
(weight.to_local().device.type, list(weight.to_local().shape), weight.full_tensor().sum().item())
"""
PIPELINE = """
from axon_nb.parallel import Pipeline
from axon_nb.parallel.models import GPT, GPTConfig, next_byte_loss
config = GPTConfig(context=8, hidden=16, heads=2, blocks=4)
torch.manual_seed(0)
pipe = Pipeline.split(GPT(config).to(device), num_microbatches=4, schedule="1F1B", loss=next_byte_loss)
tokens = torch.randint(256, (4, 9), generator=torch.Generator().manual_seed(1)).to(device)
losses = pipe.step(tokens[:, :-1], tokens[:, 1:])
[] if losses is None else [round(float(loss), 3) for loss in losses]
"""
PARALLEL_3D = """
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from axon_nb.parallel import Parallel3D, make_mesh
from axon_nb.parallel.models import GPT, GPTConfig, next_byte_loss
plan = {f"block*.attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
plan |= {"block*.attention.out": RowwiseParallel(), "block*.up": ColwiseParallel(), "block*.down": RowwiseParallel()}
torch.manual_seed(0)
gpt = GPT(GPTConfig(context=8, hidden=16, heads=2, blocks=4)).to(device)
grid = make_mesh(pp=2, tp=2)
three = Parallel3D(gpt, grid, tp_plan=plan, loss=next_byte_loss, num_microbatches=2)
tokens = torch.randint(256, (4, 9), generator=torch.Generator().manual_seed(1)).to(device)
losses = three.step(tokens[:, :-1], tokens[:, 1:])
[] if losses is None else [round(float(loss), 3) for loss in losses]
"""
ALONE = """
torch.manual_seed(0)
gpt = GPT(GPTConfig(context=8, hidden=16, heads=2, blocks=4)).to(device)
[round(float(next_byte_loss(gpt(x[:, :-1]), x[:, 1:])), 3) for x in tokens.chunk(parts)]
"""
TENSOR = """
from axon_nb.parallel import make_mesh, parallelize
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
torch.manual_seed(0)
layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)).to(device)
x = torch.ones(2, 8, device=device)
expected = layers(x).sum().item()
parallelize(layers, {"0": ColwiseParallel(), "1": RowwiseParallel()}, mesh=make_mesh(tp=world_size)["tp"])
(abs(layers(x).sum().item() - expected) < 1e-3, list(layers[0].weight.to_local().shape))
"""
SAVE = """
from axon_nb.parallel.checkpoint import Checkpoints
checkpoints = Checkpoints({folder!r})
checkpoints.save(1, model=model, optimizer=optimizer)
saved = model.module.weight.sum().item()
step()
resumed = checkpoints.load_latest(model=model, optimizer=optimizer)
(resumed.step, model.module.weight.sum().item() == saved)
"""
SUM = "t = torch.ones(1, device=device); dist.all_reduce(t)\nt.item()"


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Script]:
    """A script with four ranks on the first card."""
    with Script(tmp_path_factory.mktemp("smoke")) as script:
        devices = "0" if CARD else "cpu"
        script.ok(f"import axon_nb\nc = axon_nb.start({RANKS}, backend='gloo', devices={devices!r}, name='smoke')")
        yield script


def values(script: Script, cell: str) -> dict[int, Any]:
    """What the last expression of a cell is on each rank."""
    return dict(script.value(f"dict(c.run({cell!r}, quiet=True).values)"))


@pytest.mark.gpu
def test_single_rank_on_nccl_computes_the_sum(tmp_path: Path) -> None:
    with Script(tmp_path) as script:
        script.ok("import axon_nb\nc = axon_nb.start(1, backend='nccl', name='nccl')")
        assert values(script, SUM) == {0: 1.0}


def test_ddp_keeps_weights_equal_on_all_ranks(card: Script) -> None:
    assert len(set(values(card, DDP).values())) == 1


def test_fsdp2_shards_on_the_gpu_and_trains(card: Script) -> None:
    found = values(card, FSDP2)
    assert set(found) == set(range(RANKS))
    assert set(map(str, found.values())) == {str(found[0])}
    assert found[0][:2] == ("cuda" if CARD else "cpu", [4, 8])


def test_pipeline_losses_match_one_process(card: Script) -> None:
    losses = values(card, PIPELINE)
    assert [losses[rank] for rank in range(RANKS - 1)] == [[]] * (RANKS - 1)
    assert losses[RANKS - 1] == pytest.approx(values(card, f"parts = 4{ALONE}")[0], abs=2e-3)


def test_tensor_parallel_layers_match_full_layers(card: Script) -> None:
    assert set(map(str, values(card, TENSOR).values())) == {"(True, [4, 8])"}


def test_three_axis_model_losses_match_one_process(card: Script) -> None:
    losses = values(card, PARALLEL_3D)
    assert losses[0] == losses[1] == []
    assert losses[3] == losses[2] == pytest.approx(values(card, f"parts = 2{ALONE}")[0], abs=2e-3)


def test_failed_rank_releases_the_others(card: Script) -> None:
    values(card, DDP)
    answer = card.run("c.run('step(fail=1)', quiet=True)", timeout=60)
    assert "rank 1: ValueError: as planned" in answer.message
    assert len(set(values(card, "step()").values())) == 1


def test_interrupt_ends_a_waiting_collective(card: Script) -> None:
    waits = "if rank: dist.all_reduce(torch.ones(1, device=device))\nelse:\n    while True: torch.ones(9).sum()"
    assert "CellTimeoutError" in card.run(f"c.run({waits!r}, timeout=3, quiet=True)", timeout=60).kinds
    assert set(values(card, SUM).values()) == {RANKS}


def test_killed_rank_is_replaced_with_a_peers_variables(card: Script) -> None:
    values(card, DDP)
    dies = "import os, signal\nif rank == 2: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()"
    assert "rank 2 was killed by SIGKILL" in card.run(f"c.run({dies!r}, quiet=True)", timeout=60).message
    assert card.value("c.repair(from_rank=0).ranks") == (2,)
    assert len(set(values(card, "step()").values())) == 1


def test_views_have_data(card: Script) -> None:
    values(card, DDP)
    words = {"memory": "model", "shards": "weight", "timeline": f"Timeline, {RANKS} ranks", "watch": f"{RANKS} ranks"}
    for view, word in words.items():
        names = "'model', " if view in ("memory", "shards") else ""
        assert until(lambda v=view, n=names, w=word: w in card.ok(f"_ = axon_nb.show.{v}({n}cluster=c)").out), view
    assert card.value("'model' in set(c.variables()['name'])") is True


def test_checkpoint_restores_the_weights(card: Script, tmp_path: Path) -> None:
    values(card, DDP)
    assert set(values(card, SAVE.format(folder=str(tmp_path))).values()) == {(1, True)}


def test_tensors_are_pushed_and_pulled(card: Script) -> None:
    card.ok("import numpy as np\nc.push({'sent': np.arange(6.0)})")
    assert set(values(card, "on_card = torch.as_tensor(sent, device=device) * 2\non_card.sum().item()").values()) == {
        30.0
    }
    assert card.value("(lambda t: (str(t.device), t.tolist()))(c.pull('on_card', ranks=3))") == (
        "cpu",
        [0.0, 2.0, 4.0, 6.0, 8.0, 10.0],
    )


@pytest.mark.gpu
def test_cupy_arrays_are_summed_pulled_and_compared(card: Script) -> None:
    pytest.importorskip("cupy")
    cell = "import cupy\nfrom axon_nb import comm\na = cupy.full(3, rank + 1.0)\ncomm.all_reduce_sum(a)\na.tolist()"
    assert set(map(str, values(card, cell).values())) == {"[10.0, 10.0, 10.0]"}
    assert card.value("(lambda a: (type(a).__module__, a.tolist()))(c.pull('a', ranks=1))") == ("numpy", [10.0] * 3)
    card.ok("c.run('a[2] += rank == 2')")
    assert card.value("c.diff('a')[['rank', 'first at', 'values']].values.tolist()") == [[2, "[2]", "10.0 / 11.0"]]
    facts = card.value("c.variables().set_index('name').loc['a', ['shape', 'device', 'ranks']].tolist()")
    assert facts == ["3", "cuda:0", "differs on rank 2"]
