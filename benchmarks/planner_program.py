"""`plan.run` against real steps of the same programs, on 2 Gloo ranks with 1 thread, calibrated on another model."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from axon_nb import plan
from axon_nb.comm import World
from axon_nb.parallel import make_mesh
from axon_nb.parallel.models import GPT, next_byte_loss
from benchmarks.planner_time import CALIBRATED_ON, CALIBRATION_BATCH, ERROR, tokens
from benchmarks.report import Row, write
from tests.plan.program.programs import FOUR_RANKS, PROGRAMS

NAMES = [name for name in PROGRAMS if name not in FOUR_RANKS]


def measured(name: str, rounds: int) -> float:
    """Median seconds of a program's steps after the first, on the slowest rank."""
    taken = []
    for _ in range(rounds):
        ends: list[float] = []
        hook = register_optimizer_step_post_hook(lambda *_, ends=ends: ends.append(time.perf_counter()))
        PROGRAMS[name]()
        hook.remove()
        taken += [after - before for before, after in pairwise(ends)]
    slowest = torch.tensor(statistics.median(taken))
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def rank_side(out: Path, rounds: int) -> None:
    """Run on each rank: calibrate and measure; rank 0 predicts and writes both."""
    torch.set_num_threads(1)
    World.init("gloo")
    batch = tokens(CALIBRATED_ON, CALIBRATION_BATCH)
    here = plan.calibrate(
        make_mesh(device="cpu", all=2),
        model=lambda: GPT(CALIBRATED_ON),
        inputs=batch,
        target=batch,
        loss=next_byte_loss,
        optimizer=torch.optim.AdamW,
    )
    seconds = {name: measured(name, rounds) for name in NAMES}
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank == 0:
        planned = {name: plan.run(PROGRAMS[name], 2, device="cpu", rates=here, links=here) for name in NAMES}
        found = {name: [seconds[name], dict(planned[name].parts)] for name in NAMES}
        out.write_text(json.dumps({"programs": found, "here": str(here)}))


def rows_of(programs: dict[str, Any]) -> list[Row]:
    """The error of each program's step."""
    rows = []
    for name, (seconds, parts) in programs.items():
        split = ", ".join(f"{part} {1e3 * value:.1f}" for part, value in parts.items() if value)
        note = f"measured {1e3 * seconds:.1f} ms; predicted {1e3 * sum(parts.values()):.1f} ms: {split}"
        rows.append(Row(f"error of a step, {name}", abs(sum(parts.values()) / seconds - 1), "", limit=ERROR, note=note))
    return rows


def main() -> None:
    """Measure, print the table and write it to benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round, as a smoke test")
    parser.add_argument("--rounds", type=int, default=10, help="runs of each program")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--rank-side", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    if options.rank_side is not None:
        rank_side(options.rank_side, rounds)
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "measured.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        own = ["-m", "benchmarks.planner_program", f"--rank-side={out}", f"--rounds={rounds}"]
        subprocess.run([*launcher, *own], check=True)
        answer: dict[str, Any] = json.loads(out.read_text())
    print(answer["here"])
    print(write("planner_program", rows_of(answer["programs"]), options.out))


if __name__ == "__main__":
    main()
