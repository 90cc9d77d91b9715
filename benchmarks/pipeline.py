"""`Pipeline` against torch's own schedules on plain Gloo under torchrun; bubble; overhead of spans."""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from axon_nb.comm import World
from axon_nb.parallel import Pipeline, bubble_fraction, ideal_timeline
from axon_nb.parallel.models import GPT, GPTConfig, next_byte_loss
from axon_nb.parallel.pipeline.stages import balanced_stage_starts, split_sections
from axon_nb.records import Span
from axon_nb.records import spans as trace
from benchmarks.pairs import PairedRow
from benchmarks.report import Row, median, write

CONFIG = GPTConfig(context=64, hidden=128, heads=4, blocks=6)
BATCH, MICROBATCHES = 16, 8
STEP_RATIO, SPANS_RATIO, MEMORY_RATIO = 1.02, 1.02, 1.01
BUBBLE_EXCESS = 0.04
SLEEP_S = 0.04
STAGES = {"1F1B": 2, "Interleaved1F1B": 4}
"""Schedules compared on 2 ranks, with the number of stages."""
BUBBLES = {"GPipe": 4, "1F1B": 4, "Interleaved1F1B": 8}
"""Schedules whose bubble is measured on 4 ranks, with the number of stages."""
Step = Callable[[], object]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and next tokens, the same on all ranks."""
    tokens = torch.randint(256, (BATCH, CONFIG.context + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


def model() -> GPT:
    """The model, the same on all ranks."""
    torch.manual_seed(0)
    return GPT(CONFIG)


def our_step(schedule: str, *, spans: bool = True) -> Step:
    """A training step with `Pipeline`."""
    pipe = Pipeline.split(
        model(),
        num_stages=STAGES[schedule],
        schedule=schedule,
        num_microbatches=MICROBATCHES,
        loss=next_byte_loss,
        spans=spans,
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=1e-3)
    x, y = batch()

    def step() -> None:
        optimizer.zero_grad()
        pipe.step(x, y)
        optimizer.step()

    return step


def torch_step(schedule: str) -> Step:
    """The same, written directly with torch."""
    whole, count, rank = model(), STAGES[schedule], dist.get_rank()
    starts = balanced_stage_starts(whole, "params", count, sample=None, group=World().default_group())
    parts = split_sections(whole, starts)
    own = list(range(rank, count, dist.get_world_size()))
    stages = [PipelineStage(parts[index], index, count, torch.device("cpu")) for index in own]
    made: Any
    if schedule == "1F1B":
        made = Schedule1F1B(stages[0], MICROBATCHES, loss_fn=next_byte_loss)
    else:
        made = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=next_byte_loss)
    optimizer = torch.optim.SGD([p for index in own for p in parts[index].parameters()], lr=1e-3)
    x, y = batch()

    def step() -> None:
        optimizer.zero_grad()
        inputs = (x,) if 0 in own else ()
        target: dict[str, Any] = {"target": y, "losses": []} if count - 1 in own else {}
        made.step(*inputs, return_outputs=False, **target)
        optimizer.step()

    return step


def seconds(step: Step, count: int) -> float:
    """Mean seconds per step over `count` steps, until all ranks have finished."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(count):
        step()
    dist.barrier()
    return (time.perf_counter() - start) / count


def pairs_of(first: Step, second: Step, *, pairs: int, count: int) -> list[tuple[float, float]]:
    """Alternating measurements of both, in seconds."""
    seconds(first, 2), seconds(second, 2)
    measured = []
    for number in range(pairs):
        one, other = (first, second) if number % 2 else (second, first)
        times = seconds(one, count), seconds(other, count)
        measured.append(times if number % 2 else times[::-1])
    return measured


class Wait(torch.autograd.Function):
    """Sleeps in forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        """Sleep for `forward_s` seconds."""
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Sleep for `backward_s` seconds."""
        time.sleep(ctx.backward_s)
        return grads[0], None, None


class Sleeper(nn.Module):
    """A stage that takes equal time for forward, input backward and weight backward."""

    def __init__(self, seconds_each: float) -> None:
        super().__init__()
        self.seconds_each = seconds_each
        self.shift, self.scale = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, 8) to the same shape."""
        passed: torch.Tensor = Wait.apply(x + self.shift, self.seconds_each, self.seconds_each)
        scale: torch.Tensor = Wait.apply(self.scale, 0.0, self.seconds_each)
        return passed * scale


def bubble(schedule: str, steps: int) -> float:
    """Median measured bubble over some steps; collective."""
    count = BUBBLES[schedule]
    stages = [Sleeper(SLEEP_S * dist.get_world_size() / count) for _ in range(count)]
    pipe = Pipeline.from_modules(stages, schedule=schedule, num_microbatches=MICROBATCHES, loss=nn.functional.mse_loss)
    x = torch.ones(MICROBATCHES, 8)
    found = []
    for _ in range(steps + 1):
        dist.barrier()
        position = trace.ring.position
        pipe.step(x, x)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, trace.ring.since(position)[0])
        spans: list[Span] = [span for own in everyone for span in own]
        found.append(bubble_fraction(spans))
    return median(found[1:])


def rank_side(what: str, out: Path, *, pairs: int, count: int) -> None:
    """Run on each rank; rank 0 writes the measurements."""
    torch.set_num_threads(1)
    World.init("gloo")
    measured: Any
    if what == "bubbles":
        measured = {schedule: bubble(schedule, max(2, pairs // 8)) for schedule in BUBBLES}
    elif what == "pairs":
        measured = {
            f"a training step with {schedule}": pairs_of(
                our_step(schedule), torch_step(schedule), pairs=pairs, count=count
            )
            for schedule in STAGES
        }
        measured["spans"] = pairs_of(our_step("1F1B"), our_step("1F1B", spans=False), pairs=pairs, count=count)
    else:
        arm, schedule = what.split(":")
        seconds(our_step(schedule) if arm == "ours" else torch_step(schedule), 4 * count)
        peak = torch.tensor(float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
        dist.all_reduce(peak)
        measured = peak.item()
    if dist.get_rank() == 0:
        out.write_text(json.dumps(measured))
    dist.destroy_process_group()


def launched(what: str, ranks: int, *, pairs: int, count: int) -> Any:
    """Run under torchrun and return what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "measured.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        own = ["-m", "benchmarks.pipeline", f"--rank-side={what}", f"--to={out}", f"--pairs={pairs}"]
        subprocess.run([*launcher, *own, f"--count={count}"], check=True)
        return json.loads(out.read_text())


def rows(*, pairs: int, count: int) -> list[Row]:
    """Build the table's rows."""
    found: list[Row] = []
    paired = launched("pairs", 2, pairs=pairs, count=count)
    for name, both in paired.items():
        if name == "spans":
            row, peer = PairedRow.of_ratios("recording spans, a step with / without", both, SPANS_RATIO), "without"
        else:
            row, peer = PairedRow.of_ratios(name, both, STEP_RATIO), "torch"
        found.append(replace(row, peer=peer))
    for schedule in STAGES:
        ours, peer = (
            median([launched(f"{arm}:{schedule}", 2, pairs=1, count=count) for _ in range(3)]) / 1024
            for arm in ("ours", "torch")
        )
        name = f"peak memory of 2 ranks with {schedule}"
        found.append(Row(name, ours, "MiB", "torch", peer, MEMORY_RATIO))
    for schedule, measured in launched("bubbles", 4, pairs=pairs, count=count).items():
        stages = BUBBLES[schedule]
        ideal = bubble_fraction(ideal_timeline(schedule, num_ranks=4, num_stages=stages, num_microbatches=MICROBATCHES))
        note = f"measured {measured:.3f}, ideal {ideal:.3f}; 4 ranks, {MICROBATCHES} microbatches"
        found.append(Row(f"bubble of {schedule} above ideal", measured - ideal, "", limit=BUBBLE_EXCESS, note=note))
    return found


def main() -> None:
    """Measure under torchrun, print the table and write it to benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few pairs, as a smoke test")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--count", type=int, default=5, help=argparse.SUPPRESS)
    parser.add_argument("--rank-side", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--to", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_side is not None:
        rank_side(options.rank_side, options.to, pairs=options.pairs, count=options.count)
        return
    pairs, count = (4, 2) if options.quick else (options.pairs, options.count)
    print(write("pipeline", rows(pairs=pairs, count=count), options.out))


if __name__ == "__main__":
    main()
