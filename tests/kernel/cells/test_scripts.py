"""Scripts run as cells: calls that set up a process group find the existing one."""

from __future__ import annotations

from tests.support.kernel import Kernel


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
