"""Overhead of recoverable groups over plain Gloo, alternating in the same rank processes: `make bench`."""

from __future__ import annotations

import argparse
import ast
from pathlib import Path
from typing import Any

from benchmarks.pairs import PairedRow
from benchmarks.report import Row, median, write
from tests.support.kernel import Kernel

ROOT = Path(__file__).parents[1]
SIZES = (4, 4 << 10, 256 << 10, 4 << 20, 64 << 20)
OPERATIONS = {"all_reduce": 10.0, "broadcast": 10.0, "all_gather": 10.0, "reduce_scatter": 60.0, "send/recv": 60.0}
"""Operations, with the allowed overhead per call in microseconds."""
STEPS = {"DDP": 1.02, "FSDP2": 1.02}
"""Training steps, with the allowed ratio."""


def _size(size: int) -> str:
    power = 2 if size >= 1 << 20 else 1 if size >= 1 << 10 else 0
    return f"{size >> 10 * power} {('B', 'KiB', 'MiB')[power]}"


def _ask(kernel: Kernel, expression: str) -> Any:
    """Evaluate an expression on all ranks and return rank 0's value."""
    kernel.ok(f"%%distributed --out measured\n{expression}", timeout=600)
    return ast.literal_eval(kernel.ok("measured.values[0]").result)


def operations(kernel: Kernel, *, pairs: int, budget_s: float) -> list[PairedRow]:
    """Each operation at each size; the smallest also on plain Gloo against itself."""
    rows = []
    for name, limit in OPERATIONS.items():
        for size in SIZES:
            call = f"workloads.time_operations({{}}, {name!r}, {size}, pairs={pairs}, budget_s={budget_s})"
            measure = f"{name} of {_size(size)}"
            rows.append(
                PairedRow.of_differences(f"{measure}, longer per call", _ask(kernel, call.format("groups")), limit)
            )
            if size == SIZES[0]:
                noise = _ask(kernel, call.format("plain"))
                rows.append(PairedRow.of_differences(f"{measure}, two plain groups", noise, None))
    return rows


def steps(kernel: Kernel, *, pairs: int, count: int) -> list[PairedRow]:
    """Each training step, also on plain Gloo against itself."""
    rows = []
    for name, limit in STEPS.items():
        call = f"workloads.time_steps({{}}, {name!r}, pairs={pairs}, count={count})"
        rows.append(PairedRow.of_ratios(f"{name} training step", _ask(kernel, call.format("groups")), limit))
        noise = _ask(kernel, call.format("plain"))
        rows.append(PairedRow.of_ratios(f"{name} training step, two plain groups", noise, None))
    return rows


def thread_wakeup(kernel: Kernel) -> Row:
    """Round trip of waking another thread and being woken by it, on an idle machine."""
    seconds = _ask(kernel, "workloads.time_hand_overs(500) if rank == 0 else []")
    return Row("a second thread is woken and answers", median(seconds) * 1e6, "us")


def main() -> None:
    """Measure on 2 ranks with 1 thread each, print the table and write it to benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few pairs, as a smoke test")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    pairs, budget_s, count = (4, 0.01, 2) if options.quick else (options.pairs, 0.1, 3)
    with Kernel() as kernel:
        kernel.ok(
            "%load_ext axon_nb\n%distributed config threads=1\n%distributed start -n 2 --devices cpu", timeout=120
        )
        kernel.ok(
            f"%%distributed\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom benchmarks import workloads\n"
            "groups = workloads.make_groups()\nplain = workloads.make_groups()[1], groups[1]"
        )
        rows = [
            *steps(kernel, pairs=3 * pairs, count=count),
            *operations(kernel, pairs=pairs, budget_s=budget_s),
            thread_wakeup(kernel),
        ]
        kernel.ok("%distributed stop")
    print(write("overhead", rows, options.out))


if __name__ == "__main__":
    main()
