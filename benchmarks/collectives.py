"""Overhead of `axon_nb.comm` over torch.distributed, both on plain Gloo under torchrun: `make bench`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from axon_nb import comm
from axon_nb.comm.collectives.direct import all_gather_single, reduce_scatter_single
from axon_nb.parallel import DDP
from benchmarks.pairs import PairedRow
from benchmarks.report import write

SMALL = 4
LARGE = (1 << 20, 16 << 20, 64 << 20)
EXTRA_US = 5.0
RATIO = 1.03
NUM_GRADIENTS, GRADIENT_ELEMENTS = 200, 1000
Arms = tuple[Callable[[], object], Callable[[], object]]


def arms(name: str, size: int) -> Arms:
    """Our and torch's version of one collective on float32 tensors of `size` bytes."""
    tensor = torch.ones(size // 4)
    ranks = dist.get_world_size()

    def gather() -> torch.Tensor:
        out = torch.empty(tensor.numel() * ranks)
        all_gather_single(out, tensor)
        return out

    def scatter() -> torch.Tensor:
        out = torch.empty(whole.numel() // ranks)
        reduce_scatter_single(out, whole)
        return out

    whole = torch.ones(max(size // 4, ranks))
    return {
        "all_reduce": (lambda: comm.all_reduce_max(tensor), lambda: dist.all_reduce(tensor, dist.ReduceOp.MAX)),
        "broadcast": (lambda: comm.broadcast(tensor), lambda: dist.broadcast(tensor, 0)),
        "all_gather": (lambda: comm.all_gather(tensor), gather),
        "reduce_scatter": (lambda: comm.reduce_scatter_sum(whole), scatter),
    }[name]


def gradient_arms() -> Arms:
    """Many small gradients: bucketed, and one by one."""
    gradients = [torch.ones(GRADIENT_ELEMENTS) for _ in range(NUM_GRADIENTS)]

    def one_by_one() -> None:
        for gradient in gradients:
            dist.all_reduce(gradient)
            gradient.div_(dist.get_world_size())

    return lambda: comm.sync_gradients(gradients), one_by_one


def step_arms() -> Arms:
    """A training step with our DDP and with torch's."""

    def step_of(wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> Callable[[], object]:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(512, 512) for _ in range(6)]
        model = wrap(torch.nn.Sequential(*layers))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        x = torch.randn(64, 512)

        def step() -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        return step

    return step_of(DDP), step_of(DistributedDataParallel)


def seconds(call: Callable[[], object], count: int) -> float:
    """Mean seconds per call over `count` calls."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def pairs_of(both: Arms, *, pairs: int, budget_s: float) -> list[tuple[float, float]]:
    """Alternating measurements of both arms, as (ours, torch's) in seconds."""
    ours, theirs = both
    once = max(seconds(ours, 2), seconds(theirs, 2))
    count = torch.tensor([max(1, min(500, int(budget_s / once)))])
    dist.broadcast(count, 0)
    measured = []
    for number in range(pairs):
        first, second = (ours, theirs) if number % 2 else (theirs, ours)
        times = seconds(first, int(count)), seconds(second, int(count))
        measured.append(times if number % 2 else times[::-1])
    return measured


def rank_side(out: Path, *, pairs: int, budget_s: float) -> None:
    """Run on each rank; rank 0 writes the measurements."""
    torch.set_num_threads(1)
    comm.World.init("gloo")
    measured = {
        f"{name} {size}": pairs_of(arms(name, size), pairs=pairs, budget_s=budget_s)
        for name in ("all_reduce", "broadcast", "all_gather", "reduce_scatter")
        for size in (SMALL, *LARGE)
    }
    measured["step"] = pairs_of(step_arms(), pairs=pairs, budget_s=budget_s)
    measured["gradients"] = pairs_of(gradient_arms(), pairs=pairs, budget_s=budget_s)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(measured))
    dist.destroy_process_group()


def rows_of(measured: dict[str, list[tuple[float, float]]]) -> list[PairedRow]:
    """Build the table's rows."""
    rows = []
    for name, pairs in measured.items():
        if name == "gradients":
            rows.append(PairedRow.of_ratios(f"{NUM_GRADIENTS} small gradients, buckets / one by one", pairs, 1 / 3))
            continue
        if name == "step":
            rows.append(PairedRow.of_ratios("a training step of DDP", pairs, RATIO))
            continue
        operation, size = name.split()
        if int(size) == SMALL:
            rows.append(PairedRow.of_differences(f"{operation} of {size} B, longer per call", pairs, EXTRA_US))
        else:
            rows.append(PairedRow.of_ratios(f"{operation} of {int(size) >> 20} MiB", pairs, RATIO))
    return rows


def main() -> None:
    """Measure on 2 ranks with 1 thread each, print the table and write it to benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few pairs, as a smoke test")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--rank-side", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    pairs, budget_s = (4, 0.01) if options.quick else (options.pairs, 0.1)
    if options.rank_side is not None:
        rank_side(options.rank_side, pairs=pairs, budget_s=budget_s)
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "measured.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        own = ["-m", "benchmarks.collectives", f"--rank-side={out}", f"--pairs={pairs}"]
        subprocess.run([*launcher, *own, *(["--quick"] if options.quick else [])], check=True)
        measured = {name: [(ours, peer) for ours, peer in pairs] for name, pairs in json.loads(out.read_text()).items()}
    print(write("collectives", rows_of(measured), options.out))


if __name__ == "__main__":
    main()
