"""Predicted against measured step times on 2 ranks with 1 thread, calibrated on another model; planning time."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from axon_nb import plan
from axon_nb.comm import World
from axon_nb.parallel import DDP, FSDP, PipelineSchedule, ShardingStrategy, make_mesh
from axon_nb.parallel.models import GPT, GPTConfig, next_byte_loss
from benchmarks.report import Row, median, write

CALIBRATED_ON = GPTConfig(context=64, hidden=128, heads=4, blocks=2)
CALIBRATION_BATCH = 8
MODELS: dict[str, tuple[GPTConfig, int]] = {
    "a wider GPT": (GPTConfig(context=64, hidden=256, heads=8, blocks=3), 8),
    "a deeper GPT": (GPTConfig(context=64, hidden=128, heads=4, blocks=8), 8),
    "a larger batch": (GPTConfig(context=128, hidden=192, heads=6, blocks=3), 16),
}
STRATEGIES = ("ddp", "full_shard")
PHASES = ("forward", "backward", "optimizer")
ERROR = 0.20
SCHEDULE_MS = 10.0
SEARCH_S = 30.0
STAGES, MICROBATCHES = 16, 64


def tokens(config: GPTConfig, batch: int) -> torch.Tensor:
    """A batch of tokens."""
    return torch.randint(256, (batch, config.context), generator=torch.Generator().manual_seed(0))


def stepper(config: GPTConfig, batch: int, strategy: str, mesh: Any) -> Callable[[], list[float]]:
    """A training step that returns when forward, backward and the optimizer's step ended."""
    torch.manual_seed(0)
    model: Any = GPT(config)
    if strategy == "ddp":
        model = DDP(model, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    else:
        model = FSDP(model, mesh=mesh, strategy=ShardingStrategy(strategy))
        optimizer = model.optimizer(torch.optim.AdamW, lr=1e-4)
    drawn = tokens(config, batch)

    def step() -> list[float]:
        optimizer.zero_grad()
        number = next_byte_loss(model(drawn), drawn)
        moments = [time.perf_counter()]
        number.backward()
        moments.append(time.perf_counter())
        optimizer.step()
        return [*moments, time.perf_counter()]

    return step


def measured(step: Callable[[], list[float]], repeats: int) -> list[float]:
    """Median seconds on the slowest rank: forward, backward, optimizer's step, and total."""
    taken = []
    for _ in range(repeats + 3):
        dist.barrier()
        start = time.perf_counter()
        moments = [start, *step()]
        phases = [after - before for before, after in itertools.pairwise(moments)]
        taken.append([*phases, moments[-1] - start])
    slowest = torch.tensor([statistics.median(column) for column in zip(*taken[3:], strict=True)])
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    seconds: list[float] = slowest.tolist()
    return seconds


def rank_side(out: Path, *, rounds: int, repeats: int) -> None:
    """Run on each rank: calibrate, then predict and measure each model, several times; rank 0 writes the results."""
    torch.set_num_threads(1)
    World.init("gloo")
    mesh = make_mesh(device="cpu", dp=2)
    batch = tokens(CALIBRATED_ON, CALIBRATION_BATCH)
    cases = [(name, *model, strategy) for name, model in MODELS.items() for strategy in STRATEGIES]
    steps = [stepper(config, size, strategy, mesh) for _, config, size, strategy in cases]
    found: list[dict[str, Any]] = []
    said = ""
    for _ in range(rounds):  # machine speed drifts: measure together what is compared
        here = plan.calibrate(
            mesh,
            model=lambda: GPT(CALIBRATED_ON),
            inputs=batch,
            target=batch,
            loss=next_byte_loss,
            optimizer=torch.optim.AdamW,
            repeats=repeats,
        )
        said = str(here)
        for (name, config, size, strategy), step in zip(cases, steps, strict=True):
            predicted = plan.step_time(config, 2, batch=size, rates=here, links=here, strategy=strategy, device="cpu")
            seconds = measured(step, repeats)
            parts = {part: 1e3 * value for part, value in predicted.parts.items()}
            found.append({"name": f"{name}, {strategy}", "measured": seconds, "parts": parts})
    if dist.get_rank() == 0:
        out.write_text(json.dumps({"steps": found, "here": said}))
    dist.destroy_process_group()


def launched(*, rounds: int, repeats: int) -> dict[str, Any]:
    """Run on two ranks and return what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "measured.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        own = ["-m", "benchmarks.planner_time", f"--rank-side={out}"]
        own += [f"--rounds={rounds}", f"--repeats={repeats}"]
        subprocess.run([*launcher, *own], check=True)
        answer: dict[str, Any] = json.loads(out.read_text())
        return answer


def _off(step: dict[str, Any]) -> float:
    """Ratio of predicted to measured time."""
    return float(sum(step["parts"].values()) / (1e3 * step["measured"][-1]))


def step_rows(steps: list[dict[str, Any]]) -> list[Row]:
    """Prediction errors: median over all rounds, each with the calibration right before it."""
    rows = []
    for name, group in itertools.groupby(sorted(steps, key=itemgetter("name")), key=itemgetter("name")):
        rounds = list(group)
        rounds.sort(key=_off)
        typical = statistics.median(map(_off, rounds))
        at = rounds[len(rounds) // 2]
        *phases, seconds = (1e3 * value for value in at["measured"])
        parts = ", ".join(f"{part} {value:.1f}" for part, value in at["parts"].items())
        split = ", ".join(f"{phase} {value:.1f}" for phase, value in zip(PHASES, phases, strict=True))
        note = (
            f"predicted / measured {_off(rounds[0]):.2f} to {_off(rounds[-1]):.2f} in {len(rounds)} rounds; in a "
            f"typical one predicted {sum(at['parts'].values()):.1f} ms: {parts}; measured {seconds:.1f} ms: {split}"
        )
        rows.append(Row(f"error of a step, {name}", abs(typical - 1), "", limit=ERROR, note=note))
    return rows


def plan_rows(repeats: int) -> list[Row]:
    """Planning times in this process: the first call with a schedule, and the median of later ones."""
    rows = []
    plan.schedule("Interleaved1F1B", 4, 4)  # loads torch's pipelines, once
    for schedule in PipelineSchedule:
        taken = []
        for number in range(repeats + 1):
            start = time.perf_counter()
            plan.schedule(schedule, STAGES, MICROBATCHES, (0.01, 0.02 + 1e-6 * number), latency_s=1e-4)
            taken.append(1e3 * (time.perf_counter() - start))
        row = Row(
            f"plan of {schedule.value}, {STAGES} stages x {MICROBATCHES} microbatches",
            median(taken[1:]),
            "ms",
            limit=SCHEDULE_MS,
            note=f"{taken[0]:.1f} ms the first time, when torch's order is made",
        )
        rows.append(row)
    return rows


def large() -> list[Row]:
    """Plans of a large model."""
    config = GPTConfig(vocab=50304, context=2048, hidden=4096, heads=32, blocks=34)
    start = time.perf_counter()
    plan.communication(config, 1024, links="ib-ndr")
    counted = time.perf_counter()
    found = plan.search(config, 64, 80, global_batch=128, rates=400e12, links={"all": "ib-ndr", "tp": "nvlink4"})
    name = f"search over {len(found.candidates)} layouts of 7 billion parameters on 64 GPUs"
    return [
        Row("plan of the communication of 7 billion parameters on 1024 ranks", counted - start, "s"),
        Row(name, time.perf_counter() - counted, "s", limit=SEARCH_S),
    ]


def main() -> None:
    """Measure, print the table and write it to benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few repetitions, as a smoke test")
    parser.add_argument("--rounds", type=int, default=5, help="number of calibrations, each followed by all models")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--rank-side", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    repeats = 3 if options.quick else options.repeats
    if options.rank_side is not None:
        rank_side(options.rank_side, rounds=options.rounds, repeats=options.repeats)
        return
    answer = launched(rounds=1 if options.quick else options.rounds, repeats=repeats)
    print(answer["here"])
    rows = step_rows(answer["steps"])
    rows += plan_rows(repeats)
    rows += large()
    print(write("planner_time", rows, options.out))


if __name__ == "__main__":
    main()
