"""Ranks on a GPU: alone with NCCL, and two that share one card over Gloo."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from axon_nb.records.hooks import hook
from tests.support.script import Script

pytestmark = pytest.mark.gpu

DDP_STEP = """
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
torch.manual_seed(rank)
model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
before = [p.detach().clone() for p in model.parameters()]
loss = model(torch.randn(4, 8, device=device)).square().mean()
loss.backward()
optimizer.step()
flat = torch.cat([p.detach().flatten().cpu() for p in model.parameters()])
changed = any(not torch.equal(a, b) for a, b in zip(before, model.parameters()))
(next(model.parameters()).device.type, changed, flat.tolist())
"""


@pytest.fixture(scope="module")
def nccl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Script]:
    """A script with one rank on NCCL."""
    with Script(tmp_path_factory.mktemp("nccl")) as script:
        script.ok("import axon_nb\nc = axon_nb.start(1, backend='nccl')", timeout=120)
        yield script


@pytest.fixture(scope="module")
def shared_card(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Script]:
    """A script with two ranks on the first card, over Gloo."""
    with Script(tmp_path_factory.mktemp("gloo")) as script:
        answer = script.ok("import axon_nb\nc = axon_nb.start(2, backend='gloo', devices='0')", timeout=120)
        assert "2 ranks share 1 GPU (Gloo)." in answer.out
        yield script


def test_single_rank_computes_on_its_gpu_with_nccl(nccl: Script) -> None:
    assert nccl.value("c.run('str(device)')[0]") == "cuda:0"
    assert nccl.value("c.backend, c.run('dist.get_backend()')[0]") == ("nccl", "nccl")
    cell = "t = torch.arange(4.0, device=device)\ndist.all_reduce(t)\n(str(t.device), t.tolist())"
    assert nccl.value(f"c.run({cell!r})[0]") == ("cuda:0", [0.0, 1.0, 2.0, 3.0])


SLOW_FORWARD = """
import time
class Slow(torch.nn.Linear):
    def forward(self, x):
        torch.cuda._sleep(400_000_000)
        return super().forward(x)
layer = Slow(8, 8).to(device)
x = torch.ones(2, 8, device=device)
torch.nn.Linear(8, 8).to(device)(x)  # cuBLAS waits for the GPU when it starts
torch.cuda.synchronize()
began = time.perf_counter()
y = layer(x)
launched = time.perf_counter() - began
y.sum().backward()
dist.all_reduce(layer.weight.grad)
torch.cuda.synchronize()
(launched, time.perf_counter() - began)
"""


def test_timeline_has_the_gpus_own_times(nccl: Script) -> None:
    nccl.ok("c.spans.collect(watch_s=60)")
    launched, done = nccl.value(f"c.run({SLOW_FORWARD!r})[0]")
    frame = "__import__('time').sleep(1) or c.spans.recorded().to_frame()"
    rows = nccl.value(f"{frame}[['kind', 'name', 'clock', 'start', 'seconds']].values.tolist()")
    forward = next(row for row in reversed(rows) if row[0] == "forward")
    backward = next(row for row in reversed(rows) if row[0] == "backward")
    total = next(row for row in reversed(rows) if row[1] == "all_reduce")
    assert [row[2] for row in (forward, backward, total)] == ["gpu"] * 3
    assert launched < forward[4] <= done  # the host was done long before the GPU
    assert backward[3] >= forward[3] + forward[4] - 1e-5  # the queue is in order
    assert total[4] > 0
    assert total[3] >= backward[3]


@pytest.mark.skipif(not hook("comm.group_hooks").is_used, reason="torch's groups have hooks since 2.14")
def test_calls_of_torchs_own_groups_are_counted(nccl: Script) -> None:
    count = "import axon_nb\nwith axon_nb.calls() as counted: dist.all_reduce(torch.ones(4, device=device))\n"
    assert nccl.value(f"c.run({count + 'tuple(counted.of()[2:4])'!r})[0]") == (1, 16)


def test_ddp_step_on_nccl(nccl: Script) -> None:
    kind, changed, weights = nccl.value(f"c.run({DDP_STEP!r})[0]")
    assert (kind, changed) == ("cuda", True)
    assert len(weights) == 161


def test_status_shows_gpu_memory(nccl: Script) -> None:
    nccl.ok("c.run('block = torch.zeros(64 << 20, dtype=torch.uint8, device=device);', quiet=True)")
    device, used = nccl.value("(lambda s: (s['device'][0], int(s['device_memory'][0])))(c.status())")
    assert device == "cuda:0"
    assert used >= 64 << 20


def test_tensors_arrive_in_the_notebook_on_the_cpu(nccl: Script) -> None:
    assert nccl.value(
        "(lambda t: (str(t.device), t.sum().item()))(c.pull('torch.ones(3, device=device)', ranks=0))"
    ) == (
        "cpu",
        3.0,
    )


def test_ranks_sharing_a_gpu_reduce_over_gloo(shared_card: Script) -> None:
    assert shared_card.value("dict(c.run('str(device)').values)") == {0: "cuda:0", 1: "cuda:0"}
    cell = "t = torch.full((3,), rank + 1.0, device=device)\ndist.all_reduce(t)\n(t.device.type, t.tolist())"
    assert shared_card.value(f"dict(c.run({cell!r}).values)") == dict.fromkeys((0, 1), ("cuda", [3.0] * 3))


def test_ddp_step_keeps_weights_equal_on_both_ranks(shared_card: Script) -> None:
    values = shared_card.value(f"dict(c.run({DDP_STEP!r}).values)")
    assert values[0][:2] == values[1][:2] == ("cuda", True)
    assert values[0][2] == values[1][2]


def test_failed_rank_releases_its_peer_from_a_collective(shared_card: Script) -> None:
    cell = "if rank == 0: raise ValueError('first')\nt = torch.ones(1, device=device)\ndist.all_reduce(t)"
    answer = shared_card.run(f"c.run({cell!r})", timeout=60)
    assert answer.kinds[0] == "CellError"
    assert "rank 0: ValueError: first" in answer.message
    assert shared_card.value("dict(c.run('rank').values)") == {0: 0, 1: 1}


def test_nccl_with_two_ranks_on_one_gpu_is_rejected(tmp_path: Path) -> None:
    with Script(tmp_path) as script:
        answer = script.run("import axon_nb\naxon_nb.start(2, backend='nccl', devices='0')")
        assert "UsageError" in answer.kinds
        assert "NCCL needs one GPU per rank, but there are 2 ranks and 1 free GPU." in answer.message


RING = """
last, block = world_size - 1, torch.full((64 << 20,), float(rank), device=device)
got = torch.empty_like(block)
work = dist.isend(block, (rank + 1) % world_size)
dist.recv(got, (rank - 1) % world_size)
work.wait()
got[0].item()
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ring_of_unbatched_sends_does_not_deadlock(tmp_path: Path) -> None:
    with Script(tmp_path) as script:
        script.ok("import axon_nb\nc = axon_nb.start(backend='nccl')\nn = c.world_size")
        assert script.value(f"dict(c.run({RING!r}, timeout=60).values) == {{r: (r - 1) % n for r in range(n)}}")


def test_rebuilt_group_keeps_its_nccl_options(nccl: Script) -> None:
    made = """
options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
group = dist.new_group([0], pg_options=options)
group._get_backend(device).options.is_high_priority_stream
"""
    assert nccl.value(f"c.run({made!r})[0]") is True
    nccl.run("c.run('raise ValueError')")
    assert nccl.value("c.run('group._get_backend(device).options.is_high_priority_stream')[0]") is True
