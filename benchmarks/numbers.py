"""CPU time of training steps with `config watch_numbers=on` over unwatched ones, in the same ranks: `make bench`."""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

from benchmarks.pairs import PairedRow
from benchmarks.protection import SETUP, SIZES_MB
from benchmarks.report import write
from tests.support.kernel import Kernel

LIMIT = 1.04
SHARD = """%%distributed
from torch.distributed.fsdp import fully_shard

def shard():
    global model, optimizer
    model = model.module
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
"""


def _measure(kernel: Kernel, watch: str, count: int) -> float:
    """CPU seconds per step on rank 0."""
    kernel.ok(f"%distributed config watch_numbers={watch}")
    kernel.ok("%%distributed\nsteps(1)", timeout=600)
    kernel.ok(f"%%distributed --out measured\nsteps({count})", timeout=600)
    return float(ast.literal_eval(kernel.ok("measured.values[0]").result))


def rows(kernel: Kernel, *, pairs: int) -> list[PairedRow]:
    """A row per size of the model and way to hold it."""
    measured = []
    for size in SIZES_MB:
        for wrapper in ("DDP", "FSDP2"):
            kernel.ok(f"%%distributed\nmake({size})" + ("\nshard()" if wrapper == "FSDP2" else ""))
            times = [(_measure(kernel, "on", 200 // size), _measure(kernel, "off", 200 // size)) for _ in range(pairs)]
            measured.append(
                PairedRow.of_ratios(f"{wrapper} step, {size} MB, watched", times, LIMIT, peer="not watched")
            )
    return measured


def main() -> None:
    """Measure on 2 ranks with 1 thread each, print the table and write it to benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    with Kernel() as kernel:
        kernel.ok(
            "%load_ext axon_nb\n%distributed config threads=1\n%distributed start -n 2 --devices cpu", timeout=120
        )
        kernel.ok(SETUP)
        kernel.ok(SHARD)
        measured = rows(kernel, pairs=options.pairs)
        kernel.ok("%distributed stop")
    print(write("numbers", measured, options.out))


if __name__ == "__main__":
    main()
