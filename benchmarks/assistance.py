"""Latency of completion and help in `%%distributed` cells, with ranks idle, busy or unresponsive.

Run `python -m benchmarks.assistance [--quick]` in the project's folder, on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.report import Row, median, percentile, write
from tests.support.completion import completed, expect_completed
from tests.support.kernel import Kernel

RANKS = 4
TARGET_MS = 150.0
SETUP = """%%distributed
import pandas
from torch import nn
net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(50)))
table = pandas.DataFrame({f"column {i}": [i] for i in range(100)})
weights = {f"key {i}": i for i in range(1000)}
"""
ASKED = ("net", "net[0].we", 'table["col', 'weights["key 99', "torch.nn.functional.cross_")
BUSY = {
    "ranks idle": "",
    "ranks busy in Python": "import time\n_end = time.monotonic() + {s}\n"
    "while time.monotonic() < _end:\n    sum(range(999))",
    "ranks busy in torch": "import time\n_end, _a = time.monotonic() + {s}, torch.ones(512, 512)\n"
    "while time.monotonic() < _end:\n    _a @ _a",
    "ranks in C code that holds the GIL": "import ctypes\nctypes.PyDLL(None).usleep({s} * 1_000_000)",
}


@contextmanager
def running(kernel: Kernel, code: str, seconds: int) -> Iterator[None]:
    """Run a cell in the background."""
    if not code:
        yield
        return
    kernel.ok(f"%%distributed --noblock --out job\n{code.format(s=seconds)}")
    try:
        yield
    finally:
        kernel.ok("_ = job.result()", timeout=seconds + 60)


def measure(kernel: Kernel, name: str, rounds: int) -> list[Row]:
    """Send every request `rounds` times, with short pauses, as if typed."""
    completions, helps, empty = list[float](), list[float](), 0
    with running(kernel, BUSY[name], 2 + rounds):
        for _ in range(rounds):
            for text in ASKED:
                code = f"%%distributed\n{text}"
                began = time.perf_counter()
                found = completed(kernel, code)
                completions.append((time.perf_counter() - began) * 1e3)
                empty += not found
            began = time.perf_counter()
            request = kernel.client.inspect("%%distributed\nnet", len("%%distributed\nnet"), 0)
            while kernel.client.get_shell_msg(timeout=30)["parent_header"].get("msg_id") != request:
                continue
            helps.append((time.perf_counter() - began) * 1e3)
    # For an unresponsive rank only names, their attributes and keys are known, nothing deeper.
    note = f"{empty} of {len(completions)} answers offered nothing"
    return [
        Row(f"completion, {name}, median", median(completions), "ms", limit=TARGET_MS, note=note),
        Row(f"completion, {name}, 95 %", percentile(completions, 95), "ms", limit=TARGET_MS),
        Row(f"help, {name}, median", median(helps), "ms"),
    ]


def main() -> None:
    """Run all measurements, print the table and write it to benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds, as a smoke test")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    rounds = 2 if options.quick else 10
    with Kernel() as kernel:
        kernel.ok(f"%load_ext axon_nb\n%distributed start -n {RANKS}", timeout=120)
        kernel.ok(SETUP, timeout=120)
        expect_completed(kernel, "%%distributed\nnet[0].weigh", "net[0].weight")
        rows = [row for name in BUSY for row in measure(kernel, name, rounds)]
        kernel.ok("%distributed stop")
    print(write("assistance", rows, options.out))


if __name__ == "__main__":
    main()
