"""What undo costs a cell, and saving and restoring a branch over plain copies, in the same ranks: `make bench`."""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

from benchmarks.pairs import PairedRow
from benchmarks.protection import SETUP
from benchmarks.report import Row, median, write
from tests.support.kernel import Kernel

CELLS = {
    "10 cells `y = 1`, no model": ("", "y = 1", 10),
    "10 cells `y = 1` beside a model of 1 MB": ("make(1)", "y = 1", 10),
    "10 cells `y = 1` beside one of 30 MB, above the limit": ("make(30)", "y = 1", 10),
    "cell of 100 steps, 1 MB": ("make(1)", "steps(100)", 1),
    "cell of 20 steps, 30 MB, above the limit": ("make(30)", "steps(20)", 1),
}
"""By row: what comes first, the cell, and how often it runs."""
UNDO_LIMIT = 1.02
"""For cells that train; the others are a few milliseconds, with or without."""
SIZES_MB = (25, 100)
COPY_LIMIT, SECONDS_LIMIT = 3.0, 0.3
COPIES = """%%distributed
import torch
from axon_nb.engine.session import current

def storages():
    tensors = [*model.parameters(), *(one.grad for one in model.parameters())]
    tensors += [value for entry in optimizer.state.values() for value in entry.values()]
    return [one.detach().view(-1) for one in tensors if one is not None]

def clock():
    return time.perf_counter(), time.process_time()

def since(start):
    return tuple(now - before for now, before in zip(clock(), start))

def copies(number):
    optimizer.zero_grad()
    steps(1)
    model(x).square().mean().backward()
    protection = current().protection
    size = sum(one.nbytes for one in storages())
    plain = [one.clone() for one in storages()]
    start = clock()
    for one, copy in zip(storages(), plain):
        copy.copy_(one)
    copied = since(start)
    start = clock()
    fresh = [one.clone() for one in storages()]
    cloned = since(start)
    del plain, fresh
    protection.forget()
    start = clock()
    missing = protection.keep(f"bench {number}", 1 << 40).missing
    saved = since(start)
    optimizer.step()
    start = clock()
    refused = protection.restore(f"bench {number}", (0, 0))
    restored = since(start)
    assert not missing and not refused, (missing, refused)
    return size, copied, cloned, saved, restored
"""


def _cpu(kernel: Kernel) -> float:
    kernel.ok("%%distributed --out measured\nimport time; time.process_time()")
    return float(ast.literal_eval(kernel.ok("measured.values[0]").result))


def _cells(kernel: Kernel, undo_memory: str, cell: str, count: int) -> float:
    """CPU seconds of rank 0 for these cells, after one that takes the first snapshot."""
    kernel.ok(f"%distributed config undo_memory={undo_memory}")
    kernel.ok("%%distributed\ny = 1")
    start = _cpu(kernel)
    for _ in range(count):
        kernel.ok(f"%%distributed\n{cell}", timeout=600)
    return _cpu(kernel) - start


def undo_rows(kernel: Kernel, *, pairs: int) -> list[PairedRow]:
    """A row per kind of cell."""
    measured = []
    for name, (first, cell, count) in CELLS.items():
        kernel.ok(f"%%distributed\n{first or 'pass'}")
        times = [
            (_cells(kernel, "64MiB", cell, count), _cells(kernel, "0", cell, count)) for _ in range(pairs)
        ]  # interleaved, as the machine is seldom quiet
        limit = UNDO_LIMIT if "steps" in cell else None
        measured.append(PairedRow.of_ratios(f"CPU time, {name}", times, limit, peer="undo off"))
    return measured


def copy_rows(kernel: Kernel, *, pairs: int) -> list[Row]:
    """Saving and restoring the state of a branch, per 100 MB of state, over copying as many bytes."""
    measured: list[Row] = []
    for size in SIZES_MB:
        kernel.ok(f"%%distributed\nmake({size})\nsteps(1)")
        wall, cpu = list[tuple[float, float]](), list[tuple[float, float]]()
        for number in range(pairs):
            kernel.ok(f"%%distributed --out measured\ncopies({number})", timeout=600)
            num_bytes, copied, cloned, saved, restored = ast.literal_eval(kernel.ok("measured.values[0]").result)
            scale = 1e8 / num_bytes
            for index, into in enumerate((wall, cpu)):
                into.append(((saved[index] + restored[index]) * scale, (cloned[index] + copied[index]) * scale))
        name = f"branch: save and restore, model of {size} MB, per 100 MB of state"
        measured.append(Row(f"{name}: time", median([ours for ours, _ in wall]), "s", limit=SECONDS_LIMIT))
        measured.append(PairedRow.of_ratios(name, wall, COPY_LIMIT, peer="2 plain copies"))
        measured.append(PairedRow.of_ratios(f"{name}: CPU time", cpu, COPY_LIMIT, peer="2 plain copies"))
    return measured


def main() -> None:
    """Measure on 2 ranks with 1 thread each, print the table and write it to benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    with Kernel() as kernel:
        kernel.ok(
            "%load_ext axon_nb\n%distributed config threads=1\n%distributed start -n 2 --devices cpu", timeout=120
        )
        kernel.ok(SETUP)
        kernel.ok(COPIES)
        measured = [*copy_rows(kernel, pairs=options.pairs), *undo_rows(kernel, pairs=options.pairs)]
        kernel.ok("%distributed stop")
    print(write("undo", measured, options.out))


if __name__ == "__main__":
    main()
