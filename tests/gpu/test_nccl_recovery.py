"""Recovery where there is a GPU: one rank on NCCL, and ranks that share the card over Gloo.

What takes two GPUs is not here: an abort of a collective that waits for a peer, and a connect that is cut short.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.script import Script

pytestmark = pytest.mark.gpu

SECOND_CLASS = os.environ.get("TORCH_DIST_USE_NCCL2") == "1"
TRAIN = """
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
def step(number, fail=None):
    torch.manual_seed(100 * number + rank)
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8, device=device)).square().mean()
    if rank == fail:
        raise ValueError("as asked")
    loss.backward()
    optimizer.step()
def weights():
    return [round(x, 6) for x in torch.cat([p.detach().flatten().cpu() for p in model.parameters()]).tolist()]
"""


@pytest.fixture(scope="module")
def nccl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Script]:
    """A script with one rank on NCCL; with TORCH_DIST_USE_NCCL2=1, on torch's second class."""
    if SECOND_CLASS and not hasattr(dist, "ProcessGroupNCCL2"):
        pytest.skip("this torch has no ProcessGroupNCCL2")
    with Script(tmp_path_factory.mktemp("nccl")) as script:
        script.ok("import signal, axon_nb\nc = axon_nb.start(1, backend='nccl')", timeout=120)
        yield script


@pytest.fixture(scope="module", params=[2, 4])
def shared_card(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Script]:
    """A script with some ranks on the first card, over Gloo."""
    with Script(tmp_path_factory.mktemp("gloo")) as script:
        start = f"c = axon_nb.start({request.param}, backend='gloo', devices='0')\nlast = {request.param - 1}"
        script.ok(f"import signal, axon_nb\n{start}", timeout=120)
        yield script


def test_ddp_object_trains_on_a_fresh_communicator(nccl: Script) -> None:
    nccl.ok(f"c.run({TRAIN!r})", timeout=120)
    undisturbed = nccl.value("c.run('for i in range(4): step(i)\\nweights()')[0]")
    nccl.ok(f"c.run({TRAIN!r})")
    nccl.ok("c.run('group = dist.group.WORLD\\nbackend = group._get_backend(device)\\nfor i in range(2): step(i)')")
    answer = nccl.run("c.run('dist.all_reduce(torch.ones(1, device=device))\\nstep(2, fail=0)')", timeout=90)
    assert answer.kinds[0] == "CellError"
    assert "NCCL recovery is untested on multiple GPUs." in answer.out
    assert nccl.value("c.run('group is dist.group.WORLD, backend is group._get_backend(device)')[0]") == (True, False)
    assert nccl.value("c.run('step(2); step(3)\\nweights()')[0]") == undisturbed
    assert nccl.value("c.run('dist.barrier()\\ndist.get_backend()')[0]") == "nccl"
    assert nccl.value("c.run('t = torch.ones(2, device=device); dist.all_reduce(t)\\nt.tolist()')[0]") == [1.0, 1.0]


def test_class_of_the_communicator_is_the_one_asked_for(nccl: Script) -> None:
    name = nccl.value("c.run('type(dist.group.WORLD._get_backend(device)).__name__')[0]")
    assert name == ("ProcessGroupNCCL2" if SECOND_CLASS else "ProcessGroupNCCL")


@pytest.mark.skipif(not hasattr(dist, "ProcessGroupNCCL2"), reason="this torch has no nccl-legacy")
def test_group_of_the_older_class_keeps_it(nccl: Script) -> None:
    nccl.ok("c.run('legacy = dist.new_group([0], backend=\"nccl-legacy\")')")
    assert nccl.run("c.run('dist.all_reduce(torch.ones(1, device=device), group=legacy)\nraise ValueError()')").kinds
    cell = "t = torch.ones(1, device=device); dist.all_reduce(t, group=legacy)\n"
    kind = "type(legacy._get_backend(device)).__name__"
    assert nccl.value(f"c.run({cell + f'({kind}, t.item())'!r})[0]") == ("ProcessGroupNCCL", 1.0)


FREE = "c.run('torch.cuda.mem_get_info(device)[0]').values"
USES = """
x = torch.empty(1 << 30, dtype=torch.uint8, device=device)
del x
dist.all_reduce(torch.ones(1 << 26, device=device))
"""


def test_pause_gives_cached_memory_back(nccl: Script) -> None:
    nccl.ok(f"c.run({USES!r})", timeout=120)
    before = nccl.value(f"dict({FREE})")[0]
    assert nccl.ok("print(c.cells.pause())").out.startswith("Free on the GPU of rank 0: ")
    assert nccl.value("c.state.is_paused") is True
    total = "t = torch.ones(1, device=device); dist.all_reduce(t)\nt.item()"
    assert nccl.value(f"c.run({total!r})[0]") == 1.0
    assert nccl.value(f"dict({FREE})")[0] - before > 1 << 29
    assert nccl.value("c.state.is_paused") is False


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one rank has nothing to give back of NCCL's")
def test_pause_gives_nccls_memory_back_until_the_next_cell(tmp_path: Path) -> None:
    total = "t = torch.ones(1, device=device); dist.all_reduce(t)\nt.item()"
    with Script(tmp_path) as script:
        script.ok("import axon_nb\nc = axon_nb.start(2, backend='nccl')", timeout=120)
        script.ok(f"c.run({USES!r})\nc.run('torch.cuda.empty_cache()')", timeout=120)
        before = script.value(f"dict({FREE})")
        said = script.ok("print(c.cells.pause())", timeout=60).out
        if "NCCL keeps its own memory" in said:
            pytest.skip(said.splitlines()[-1])
        free = "import torch\n{rank: torch.cuda.mem_get_info(rank)[0] for rank in (0, 1)}"
        assert all(now > before[rank] for rank, now in script.value(free).items())
        for _ in range(2):
            assert script.value(f"dict(c.run({total!r}, timeout=60).values)") == {0: 2.0, 1: 2.0}
            script.ok("c.cells.pause()", timeout=60)
        assert (
            script.run("c.run('if rank == 0: raise ValueError()\\ndist.barrier()')", timeout=90).kinds[0] == "CellError"
        )
        assert script.value(f"dict(c.run({total!r}, timeout=60).values)") == {0: 2.0, 1: 2.0}
        script.ok("c.cells.pause()\nc.repair('1')", timeout=120)
        assert script.value(f"dict(c.run({total!r}, timeout=60).values)") == {0: 2.0, 1: 2.0}


CAPTURE = """
total = torch.zeros(2, device=device)
dist.all_reduce(total)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    dist.all_reduce(total)
total.fill_(3.0)
graph.replay()
total.tolist()
"""


def test_graph_that_outlives_its_communicator_is_captured_again(nccl: Script) -> None:
    assert nccl.value(f"c.run({CAPTURE!r}, timeout=60)[0]") == [3.0, 3.0]
    failed = nccl.run("c.run('dist.all_reduce(total)\\nraise ValueError()')")
    assert failed.kinds[0] == "CellError"
    answer = nccl.ok("c.run('dist.all_reduce(total)')", timeout=60)
    said = failed.out + failed.err + answer.out + answer.err
    assert "CUDA graphs still hold the communicators of before" in said
    assert nccl.value(f"c.run({CAPTURE!r}, timeout=60)[0]") == [3.0, 3.0]
    nccl.ok("c.run('del graph')")


def test_interrupt_on_a_busy_gpu_aborts_the_cell(nccl: Script) -> None:
    busy = "x = torch.ones(4096, 4096, device=device)\nwhile True:\n    x = x @ x * 1e-4\n    torch.cuda.synchronize()"
    answer = nccl.run(f"c.run({busy!r}, timeout=3)", timeout=60)
    assert "CellTimeoutError" in answer.kinds
    assert nccl.value("c.run('t = torch.ones(1, device=device); dist.all_reduce(t)\\nt.item()')[0]") == 1.0


def test_smaller_step_works_after_out_of_memory(nccl: Script) -> None:
    code = """
free, total = torch.cuda.mem_get_info()
def too_much():
    held = torch.empty(int(free * 0.6), dtype=torch.uint8, device=device)
    return held, torch.empty(int(free * 0.6), dtype=torch.uint8, device=device)
too_much()
"""
    report = nccl.value(
        f"try:\n    c.run({code!r})\nexcept axon_nb.CellError as error:\n"
        "    report = '\\n'.join(error._render_traceback_())\nreport"
    )
    assert "out of memory" in report
    assert "lost its CUDA context" not in report
    assert "Rank 0 ran out of memory; its tensors took" in report
    smaller = "t = torch.empty(int(free * 0.6), dtype=torch.uint8, device=device)\nt.numel() > 0"
    assert nccl.value(f"c.run({smaller!r})[0]") is True
    nccl.ok("c.run('del t; torch.cuda.empty_cache()')")


@pytest.mark.parametrize("trigger", ["raise ValueError('as asked')", "while True: torch.ones(9, device=device).sum()"])
def test_ranks_sharing_a_gpu_are_released_after_a_failure(shared_card: Script, trigger: str) -> None:
    cell = f"if rank == 0:\n    {trigger}\nt = torch.ones(3, device=device)\ndist.all_reduce(t)\nt.tolist()"
    for _ in range(5):
        answer = shared_card.run(f"c.run({cell!r}, timeout=3)", timeout=60)
        assert "CellError" in answer.kinds
        total = "t = torch.ones(1, device=device); dist.all_reduce(t)\nt.item()"
        assert shared_card.value(f"set(c.run({total!r}).values.values()) == {{last + 1.0}}")


def test_killed_rank_on_a_shared_gpu_is_replaced(shared_card: Script) -> None:
    for _ in range(3):
        answer = shared_card.run(
            "c.run('import os, signal\\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\\ndist.barrier()')",
            timeout=60,
        )
        assert "rank 1 was killed by SIGKILL" in answer.message
        assert shared_card.value("c.repair().ranks") == (1,)
        total = "t = torch.ones(1, device=device); dist.all_reduce(t)\nt.item()"
        assert shared_card.value(f"set(c.run({total!r}).values.values()) == {{last + 1.0}}")


def test_training_on_a_shared_gpu_is_unchanged_by_an_abort(shared_card: Script) -> None:
    shared_card.ok(f"c.run({TRAIN!r})", timeout=120)
    undisturbed = shared_card.value("dict(c.run('for i in range(3): step(i)\\nweights()').values)")
    shared_card.ok(f"c.run({TRAIN!r})")
    shared_card.ok("c.run('step(0)')")
    assert shared_card.run("c.run('step(1, fail=1)')").kinds[0] == "CellError"
    assert shared_card.value("dict(c.run('step(1); step(2)\\nweights()').values)") == undisturbed


def test_device_side_assert_is_reported_and_repaired(shared_card: Script) -> None:
    code = """
if rank == 1:
    torch.zeros(4, device=device)[torch.tensor([9], device=device)]
    torch.cuda.synchronize()
"""
    answer = shared_card.run(
        "try:\n    c.run(" + repr(code) + ")\nexcept axon_nb.CellError as error:\n"
        "    report = '\\n'.join(error._render_traceback_())\nreport",
        timeout=60,
    )
    assert "Rank 1 lost its CUDA context" in str(answer.value)
    assert "`%distributed repair --ranks 1`" in str(answer.value)
    assert shared_card.value("c.repair('1').ranks") == (1,)
    total = "t = torch.ones(1, device=device); dist.all_reduce(t)\nt.item()"
    assert shared_card.value(f"set(c.run({total!r}).values.values()) == {{last + 1.0}}")
