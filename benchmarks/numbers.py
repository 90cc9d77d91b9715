"""Training steps with `config watch_numbers=on` over unwatched ones, in the same ranks: `make bench`."""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

from benchmarks.pairs import PairedRow
from benchmarks.protection import SETUP, SIZES_MB
from benchmarks.report import write
from tests.support.kernel import Kernel

LIMIT = 1.02
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


TIMED = """%%distributed
from axon_nb.engine.session import current
watch, spent = current().numbers, [0.0]
plain = watch._before_step

def timed(optimizer, *rest):
    start = time.thread_time()
    plain(optimizer, *rest)
    spent[0] += time.thread_time() - start

watch._before_step = timed

def share(count):
    spent[0], start = 0.0, time.thread_time()
    seconds = steps(count)
    return seconds, (time.thread_time() - start) / count, spent[0] / count
"""


def _measure(kernel: Kernel, watch: str, count: int) -> tuple[float, float, float]:
    """Seconds per step on rank 0; CPU seconds of its main thread, and those within the hook."""
    kernel.ok(f"%distributed config watch_numbers={watch}")
    kernel.ok("%%distributed\nsteps(1)", timeout=600)
    kernel.ok(f"%%distributed --out measured\nshare({count})", timeout=600)
    seconds, cpu, hook = ast.literal_eval(kernel.ok("measured.values[0]").result)
    return seconds, cpu, hook


def rows(kernel: Kernel, *, pairs: int) -> list[PairedRow]:
    """Two rows per size of the model and way to hold it: time, and CPU time, which other programs disturb less."""
    measured = []
    for size in SIZES_MB:
        for wrapper in ("DDP", "FSDP2"):
            kernel.ok(f"%%distributed\nmake({size})" + ("\nshard()" if wrapper == "FSDP2" else ""))
            runs = [(_measure(kernel, "on", 200 // size), _measure(kernel, "off", 200 // size)) for _ in range(pairs)]
            times = [(on[0], off[0]) for on, off in runs]
            shares = [(cpu, cpu - hook) for (_, cpu, hook), _ in runs]
            name = f"{wrapper} step, {size} MB, watched"
            measured.append(PairedRow.of_ratios(name, times, LIMIT, peer="not watched"))
            measured.append(PairedRow.of_ratios(f"{name}: CPU time", shares, LIMIT, peer="without the digests"))
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
        kernel.ok(TIMED)
        measured = rows(kernel, pairs=options.pairs)
        kernel.ok("%distributed stop")
    print(write("numbers", measured, options.out))


if __name__ == "__main__":
    main()
