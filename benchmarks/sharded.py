"""Overhead of FSDP and ZeRO-1 of `axon_nb.parallel` over the same written with torch, under torchrun: `make bench`.

Time: both alternate in the same processes. Memory: separate processes, alternating; peak resident memory above the
level before the model was created, so that imports do not count.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from axon_nb import comm
from benchmarks.collectives import pairs_of
from benchmarks.pairs import PairedRow
from benchmarks.report import median, write
from benchmarks.sharded_steps import CASES, make

TIME, MEMORY = 1.02, 1.01
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
"""Makes the allocator return freed memory, so that peaks do not depend on earlier allocations."""
Pairs = list[tuple[float, float]]


def times(*, pairs: int, budget_s: float) -> dict[str, Pairs]:
    """Seconds per step of (ours, torch's), for each case."""
    return {case: pairs_of((make("ours", case), make("torch", case)), pairs=pairs, budget_s=budget_s) for case in CASES}


def peaks(arm: str) -> dict[str, float]:
    """Peak memory of each case in MiB."""
    for case in CASES:  # one-time allocations by libraries and first calls do not count
        _steps(arm, case, tiny=True)
    found = {}
    for case in CASES:
        before = _reset_peak()
        _steps(arm, case)
        found[case] = _status("VmHWM") - before
    return found


def _steps(arm: str, case: str, *, tiny: bool = False) -> None:
    step = make(arm, case, tiny=tiny)
    for _ in range(3):
        step()


def _reset_peak() -> float:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> float:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def rank_side(options: argparse.Namespace) -> None:
    """Run on each rank; rank 0 writes the measurements."""
    torch.set_num_threads(1)
    comm.World.init("gloo")
    if options.arm:
        measured: object = peaks(options.arm)
    else:
        measured = times(pairs=options.pairs, budget_s=options.budget)
    if dist.get_rank() == 0:
        options.rank_side.write_text(json.dumps(measured))
    dist.destroy_process_group()


def launch(folder: Path, *arguments: str, **variables: str) -> dict[str, list[tuple[float, float]] | float]:
    """Run two ranks and return what rank 0 wrote."""
    out = folder / "measured.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launcher, "-m", "benchmarks.sharded", f"--rank-side={out}", *arguments]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1", **variables})
    found: dict[str, list[tuple[float, float]] | float] = json.loads(out.read_text())
    return found


def memory_row(case: str, pairs: Pairs) -> PairedRow:
    """Build a row of peaks in MiB."""
    row = PairedRow.of_ratios(f"peak memory of training, {case}", pairs, MEMORY)
    ours, theirs = (median([pair[i] for pair in pairs]) for i in (0, 1))
    return replace(row, ours=ours, unit="MiB", peer="torch alone", peer_value=theirs)


def main() -> None:
    """Measure on 2 ranks with 1 thread each, print the table and write it to benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few pairs, as a smoke test")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--memory-pairs", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--rank-side", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--arm", default="", help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=float, default=0.5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_side is not None:
        rank_side(options)
        return
    if options.quick:
        options.pairs, options.memory_pairs, options.budget = 4, 2, 0.01
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        measured = launch(folder, f"--pairs={options.pairs}", f"--budget={options.budget}")
        for case, pairs in measured.items():
            row = PairedRow.of_ratios(f"step of training, {case}", [(ours, theirs) for ours, theirs in pairs], TIME)
            rows.append(replace(row, peer="torch alone"))
        taken: dict[str, Pairs] = {case: [] for case in CASES}
        for number in range(options.memory_pairs):
            arms = ("ours", "torch") if number % 2 else ("torch", "ours")
            found = {arm: launch(folder, f"--arm={arm}", **RETURNED) for arm in arms}
            for case, pairs in taken.items():
                pairs.append((found["ours"][case], found["torch"][case]))
        rows += [memory_row(case, pairs) for case, pairs in taken.items()]
    print(write("sharded", rows, options.out))


if __name__ == "__main__":
    main()
