"""Groups over shared memory against Gloo, alternating in the same processes: wall time and CPU time of each call."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions

from axon_nb.comm.shared_memory.group import BACKEND, register
from benchmarks.pairs import PairedRow
from benchmarks.report import write

SIZES = (4, 4 << 10, 64 << 10, 1 << 20, 16 << 20)
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send and recv")
LIMITS = {4: 0.3, 4 << 10: 0.3, 64 << 10: 0.3, 1 << 20: 0.5, 16 << 20: 0.6}
Call = Callable[[], object]


def call_of(name: str, size: int, group: dist.ProcessGroup) -> Call:
    """One operation on float32 tensors of `size` bytes."""
    n, rank = group.size(), group.rank()
    tensor, whole = torch.ones(size // 4), torch.ones(max(n, size // 4 // n * n))
    part, gathered = torch.ones(whole.numel() // n), torch.ones(n * tensor.numel())

    gathering, scattering = AllgatherOptions(), ReduceScatterOptions()
    gathering.asyncOp = scattering.asyncOp = False

    def to_and_fro() -> None:
        if rank == 0:
            dist.send(tensor, 1, group=group)
            dist.recv(tensor, 1, group=group)
        elif rank == 1:
            dist.recv(tensor, 0, group=group)
            dist.send(tensor, 0, group=group)

    return {
        "all_reduce": lambda: dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group),
        "all_gather": lambda: group._allgather_base(gathered, tensor, gathering).wait(),
        "reduce_scatter": lambda: group._reduce_scatter_base(part, whole, scattering).wait(),
        "broadcast": lambda: dist.broadcast(tensor, 0, group=group),
        "send and recv": to_and_fro,
    }[name]


def step_of(kind: str, group: dist.ProcessGroup) -> Call:
    """A training step of a small model."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)])
    if kind == "DDP":
        model: nn.Module = DistributedDataParallel(plain, process_group=group)
    else:
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in plain:
            fully_shard(layer, mesh=mesh)
        model = fully_shard(plain, mesh=mesh)
    optimizer, data = torch.optim.SGD(model.parameters(), lr=1e-4), torch.randn(64, 512)

    def step() -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    return step


def seconds(call: Call, count: int) -> tuple[float, float]:
    """Wall and CPU seconds per call."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        call()
    return (time.perf_counter() - wall) / count, (time.process_time() - cpu) / count


def measured(ours: Call, theirs: Call, *, pairs: int, budget_s: float) -> list[list[float]]:
    """Alternating measurements: our and Gloo's wall seconds, our and Gloo's CPU seconds."""
    once = max(seconds(call, 2)[0] for call in (ours, theirs))
    count = torch.tensor([max(1, min(300, int(budget_s / once)))])
    dist.broadcast(count, 0)
    rows = []
    for number in range(pairs):
        calls = (ours, theirs) if number % 2 else (theirs, ours)
        times = [seconds(call, int(count)) for call in calls]
        if not number % 2:
            times.reverse()
        rows.append([times[0][0], times[1][0], times[0][1], times[1][1]])
    return rows


def rank_side(rank: int, size: int, folder: Path, *, pairs: int, budget_s: float) -> None:
    """Run on each rank; rank 0 writes the measurements."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    register()
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), size), rank=rank, world_size=size)
    gloo, ours = dist.new_group(backend="gloo"), dist.new_group(backend=BACKEND)
    found = {
        f"{name} {count}": measured(
            call_of(name, count, ours), call_of(name, count, gloo), pairs=pairs, budget_s=budget_s
        )
        for name in OPERATIONS
        for count in SIZES
    }
    for kind in ("DDP", "FSDP2"):
        found[f"step {kind}"] = measured(step_of(kind, ours), step_of(kind, gloo), pairs=pairs, budget_s=budget_s)
    if rank == 0:
        (folder / "measured.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


def rows_of(size: int, found: dict[str, list[list[float]]]) -> list[PairedRow]:
    """The rows of one number of ranks: wall time with its target, CPU time without."""
    rows = []
    for name, values in found.items():
        operation, _, count = name.rpartition(" ")
        limit = 0.9 if operation == "step" else 0.5 if operation == "send and recv" else LIMITS[int(count)]
        words = f"{size} ranks, " + (
            f"a step of {count}" if operation == "step" else f"{operation} of {int(count):,} B"
        )
        rows.append(PairedRow.of_ratios(words, [(row[0], row[1]) for row in values], limit))
        rows.append(PairedRow.of_ratios(f"{words}, CPU time", [(row[2], row[3]) for row in values], None))
    return rows


def main() -> None:
    """Measure on 2 and 4 ranks with 1 thread each, print the table and write it to benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--budget", type=float, default=0.05, help="seconds of one measurement")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--rank-side", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_side:
        rank, size, folder = options.rank_side
        rank_side(int(rank), int(size), Path(folder), pairs=options.pairs, budget_s=options.budget)
        return
    rows = []
    for size in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            own = [
                sys.executable,
                "-m",
                "benchmarks.shared_memory",
                f"--pairs={options.pairs}",
                f"--budget={options.budget}",
            ]
            ranks = [subprocess.Popen([*own, "--rank-side", str(rank), str(size), folder]) for rank in range(size)]
            for process in ranks:
                process.wait()
            rows += rows_of(size, json.loads((Path(folder) / "measured.json").read_text()))
    print(write("shared_memory", rows, options.out))


if __name__ == "__main__":
    main()
