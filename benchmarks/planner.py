"""Time of a memory plan, and of starting its process: `make bench`."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from axon_nb import plan
from axon_nb.parallel.models import GPTConfig
from benchmarks.report import Row, median, write

SEVEN_BILLION = GPTConfig(vocab=32000, context=2048, hidden=4096, heads=32, blocks=34)
SECONDS, MIB = 6.0, 600.0


def plans(world: int, repeats: int) -> tuple[list[float], plan.MemoryPlan]:
    """Seconds from call to result for each repetition, and the last result."""
    taken = []
    for _ in range(repeats):
        start = time.monotonic()
        made = plan.memory(SEVEN_BILLION, world, mixed_precision="bfloat16", refresh=True)
        taken.append(time.monotonic() - start)
    return taken, made


def start_alone() -> float:
    """Seconds that a process takes to import the simulator's modules."""
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", "import axon_nb.plan.footprint.simulate"], check=True)
    return time.monotonic() - start


def main() -> None:
    """Measure, print the table and write it to benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="once each, as a smoke test")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    repeats = 1 if options.quick else 5
    rows = []
    for world in (8, 1024):
        taken, made = plans(world, repeats)
        limits = (SECONDS, MIB) if world == 1024 else (None, None)
        note = f"{made.num_parameters:,} parameters; {made.method}; peak {made.peak_bytes / 2**30:.2f} GiB per rank"
        what = f"memory of a 7B transformer on {world} ranks"
        rows.append(Row(f"{what}, time", median(taken), "s", limit=limits[0], note=note))
        rows.append(Row(f"{what}, simulator's memory", made.simulator_bytes / 2**20, "MiB", limit=limits[1]))
    rows.append(Row("of that, starting Python and torch", median([start_alone() for _ in range(repeats)]), "s"))
    print(write("planner", rows, options.out))


if __name__ == "__main__":
    main()
