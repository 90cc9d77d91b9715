"""CPU time of steps with `config protect=on` and `protect=10` over those without, in the same ranks: `make bench`."""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

from benchmarks.pairs import PairedRow
from benchmarks.report import write
from tests.support.kernel import Kernel

SIZES_MB = (10, 100)
FREQUENCIES = {"on": 1.08, "10": 1.02}
"""Values of `protect`, with the allowed ratio."""
SETUP = """%%distributed
import time
from torch import nn
from torch.nn.parallel import DistributedDataParallel

def make(megabytes, layers=8):
    global model, optimizer, x
    width = int((megabytes * 1e6 / 4 / layers) ** 0.5)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    x = torch.randn(256, width)

def steps(count):
    start = time.process_time()
    for _ in range(count):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return (time.process_time() - start) / count
"""


def _seconds(kernel: Kernel, protect: str, count: int) -> float:
    """CPU seconds per step on rank 0, after a step that fills a slot for the first time."""
    kernel.ok(f"%distributed config protect={protect}")
    kernel.ok("%%distributed\nsteps(2)", timeout=600)
    kernel.ok(f"%%distributed --out measured\nsteps({count})", timeout=600)
    return float(ast.literal_eval(kernel.ok("measured.values[0]").result))


def rows(kernel: Kernel, *, pairs: int, count: int) -> list[PairedRow]:
    """A row per size of the model and frequency."""
    measured = []
    for size in SIZES_MB:
        kernel.ok(f"%%distributed\nmake({size})")
        for protect, limit in FREQUENCIES.items():
            times = [(_seconds(kernel, protect, count), _seconds(kernel, "off", count)) for _ in range(pairs)]
            name = "every step" if protect == "on" else f"every {protect}th step"
            measured.append(
                PairedRow.of_ratios(f"DDP step, {size} MB, protected {name}", times, limit, peer="not protected")
            )
    return measured


def main() -> None:
    """Measure on 2 ranks with 1 thread each, print the table and write it to benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few pairs, as a smoke test")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    with Kernel() as kernel:
        kernel.ok(
            "%load_ext axon_nb\n%distributed config threads=1\n%distributed start -n 2 --devices cpu", timeout=120
        )
        kernel.ok(SETUP)
        pairs, count = (2, 3) if options.quick else (options.pairs, 10)
        measured = rows(kernel, pairs=pairs, count=count)
        kernel.ok("%distributed stop")
    print(write("protection", measured, options.out))


if __name__ == "__main__":
    main()
