"""Scripts and Horovod programs in cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kernel.cells.labelled import ranks_of
from tests.support.kernel import Kernel

SCRIPT = Path(__file__).resolve().parents[2] / "compat" / "horovod_digits.py"

SETUP = """%%distributed
hvd_before = set(globals())
import torch.nn as nn
import axon_nb.compat.horovod as hvd

hvd.init()
torch.manual_seed(rank)
hvd_model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
hvd.broadcast_parameters(hvd_model.state_dict(), root_rank=0)
hvd_optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(hvd_model.parameters(), lr=0.1, momentum=0.9), named_parameters=hvd_model.named_parameters()
)

def hvd_backward():
    hvd_optimizer.zero_grad()
    hvd_model(torch.full((4, 8), rank + 1.0)).square().mean().backward()

def hvd_step():
    hvd_backward()
    hvd_optimizer.step()

def hvd_equal():
    own = torch.cat([p.detach().flatten() for p in hvd_model.parameters()])
    return all(torch.equal(own, other) for other in hvd.allgather(own[None]))

hvd_step()
hvd.rank() == rank, hvd.size(), hvd.local_rank() == rank, hvd_equal()
"""

AFTER = """%%distributed
hvd.init()
# A failure may have come between the steps of two ranks.
hvd.broadcast_parameters(hvd_model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(hvd_optimizer, root_rank=0)
hvd_step()
hvd_step()
total = hvd.allreduce(torch.ones(1), name="total", op=hvd.Sum).item()
print(hvd_equal(), total)
"""

FAILURES = {
    "in an allreduce": "if rank == 1: raise ValueError('bug')\nhvd.allreduce(torch.ones(3), name='total')",
    "between backward and step": "hvd_backward()\nif rank == 1: raise ValueError('bug')\nhvd_optimizer.step()",
    "in a loop": "for i in range(100):\n    if rank == 1 and i == 5: raise ValueError('bug')\n    hvd_step()",
    "while ranks have joined": "if rank == 1: raise ValueError('bug')\nhvd.join()",
}

CLEAN = """%%distributed
hvd.shutdown()
print(hvd.is_initialized())
for hvd_name in [name for name in globals() if name not in hvd_before and name[0] != "_"]:
    del globals()[hvd_name]
"""


def test_init_process_group_attaches(kernel: Kernel) -> None:
    reply = kernel.ok(
        "%%distributed\nimport torch.distributed as td\ntd.init_process_group('gloo')\n"
        "td.init_process_group(backend='gloo', rank=rank, world_size=world_size)\nprint(td.get_world_size())"
    )
    assert reply.lines() == ["[ranks 0-3] 4"]


def test_requesting_another_backend_prints_a_note(kernel: Kernel) -> None:
    reply = kernel.ok("%%distributed\ndist.init_process_group('nccl')")
    assert reply.lines() == [
        "[ranks 0-3] axon_nb: the ranks use gloo; init_process_group('nccl') attached to that group."
    ]


def test_different_world_is_rejected(kernel: Kernel) -> None:
    reply = kernel.run("%%distributed\ndist.init_process_group('gloo', rank=0, world_size=1)")
    assert "a group of all ranks already exists" in reply.traceback


def test_destroy_keeps_the_default_group(kernel: Kernel) -> None:
    reply = kernel.ok("%%distributed\ndist.destroy_process_group()\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()")
    assert reply.lines() == [
        "[ranks 0-3] axon_nb: destroy_process_group() keeps the default group because the next cells need it.",
        "[ranks 0-3] 4.0",
    ]


def test_training_script_runs_unmodified(kernel: Kernel) -> None:
    script = """%%distributed
import os
import torch, torch.distributed as dist, torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(16, 8, generator=generator)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()
    return round(sum(p.double().sum().item() for p in model.parameters()), 9)

if __name__ == "__main__":
    print("weights", main())
"""
    reply = kernel.ok(script)
    assert len(reply.lines()) == 2
    assert reply.lines()[1].startswith("[ranks 0-3] weights ")


def test_threads_are_divided_among_ranks(kernel: Kernel) -> None:
    import os

    share = max(1, len(os.sched_getaffinity(0)) // 4)
    assert kernel.ok("%%distributed\ntorch.get_num_threads()").lines() == [f"[ranks 0-3] {share}"]


@pytest.fixture(scope="module")
def horovod(shared_kernel: Kernel) -> Iterator[Kernel]:
    """The shared kernel, whose ranks have a model under Horovod's optimizer."""
    if not shared_kernel.run("%%distributed\n1").ok:
        shared_kernel.ok("%distributed restart")
    reply = shared_kernel.ok(SETUP)
    assert reply.lines() == ["[ranks 0-3] (True, 4, True, True)"]
    yield shared_kernel
    assert shared_kernel.ok(CLEAN).lines() == ["[ranks 0-3] False"]
    shared_kernel.ok("%%distributed\ndist.barrier()")


@pytest.mark.parametrize("where", FAILURES)
def test_raising_rank_aborts_the_cell_and_the_next_one_works(horovod: Kernel, where: str) -> None:
    reply = horovod.run(f"%%distributed\n{FAILURES[where]}")
    assert reply.ename == "CellError"
    assert "ValueError: bug" in reply.traceback
    # Lines that come late are not put together with those of other ranks.
    said = {rank: line.partition("] ")[2] for line in horovod.ok(AFTER).lines() for rank in ranks_of(line)}
    assert said == dict.fromkeys(range(4), "True 4.0")


def test_waiting_ranks_name_their_horovod_call(horovod: Kernel) -> None:
    code = "dist.barrier()\nif rank == 1:\n    raise ValueError('bug')\nhvd.allreduce(torch.ones(3))"
    reply = horovod.run(f"%%distributed\n{code}")
    assert "[ranks 0,2-3] waited in allreduce at line 5" in reply.traceback
    reply = horovod.run("%%distributed\nhvd_backward() if rank else 1 / 0\nhvd_optimizer.step()")
    assert "ZeroDivisionError" in reply.traceback
    assert horovod.ok(AFTER).ok


def test_subset_of_ranks_is_rejected_at_once(horovod: Kernel) -> None:
    reply = horovod.run("%%rank 0,2\nhvd.allreduce(torch.ones(3))")
    assert (
        "allreduce at line 2 on the group of ranks 0-3 in a cell on ranks 0,2: ranks 1,3 do not run this cell"
        in reply.traceback
    )
    assert horovod.ok(AFTER).ok


def test_mismatched_tensors_raise_one_sentence_on_all_ranks(horovod: Kernel) -> None:
    reply = horovod.run("%%distributed\nhvd.allreduce(torch.ones(3 + (rank == 2)), name='total')")
    assert "hvd.allreduce 'total': rank 0 passed Average of torch.float32 of shape (3,), rank 2" in reply.traceback
    assert horovod.ok(AFTER).ok


def test_interrupt_aborts_a_loop_and_the_next_cell_works(horovod: Kernel) -> None:
    request = horovod.submit("%%distributed\nprint('on the way')\nwhile True: hvd_step()")
    horovod.wait_for_output(request, "on the way", ranks=range(4))
    horovod.interrupt()
    assert horovod.collect(request).ename == "CellInterrupt"
    after = horovod.ok(AFTER)
    assert all("True" in line for line in after.lines())


def test_script_runs_as_a_cell(horovod: Kernel) -> None:
    reply = horovod.ok(f"%%distributed\n{SCRIPT.read_text()}")
    (weights,) = [line for line in reply.lines() if "weights" in line]
    assert weights.startswith("[ranks 0-3] weights ")
    accuracies = [line for line in reply.lines() if "Accuracy" in line]
    assert len(accuracies) == 3
    again = horovod.ok(f"%%distributed\n%run {SCRIPT} --epochs 1 --fp16-allreduce")
    assert any(line.startswith("[ranks 0-3] weights ") for line in again.lines())
    assert float(accuracies[-1].rpartition(" ")[2].rstrip("%")) > 50


@pytest.mark.slow
def test_replaced_rank_joins_with_init(new_kernel: Callable[..., Kernel]) -> None:
    kernel = new_kernel()
    kernel.ok("%load_ext axon_nb\n%distributed start -n 2")
    kernel.ok("%%distributed\nimport axon_nb.compat.horovod as hvd\nhvd.init()\nhvd.allreduce(torch.ones(1))")
    kernel.run("%%rank 1\nimport os\nos._exit(3)")
    kernel.ok("%distributed repair")
    reply = kernel.ok(
        "%%distributed\nimport axon_nb.compat.horovod as hvd\nhvd.init()\n"
        "print(hvd.allreduce(torch.ones(1), op=hvd.Sum).item())"
    )
    assert reply.lines() == ["[ranks 0-1] 2.0"]
