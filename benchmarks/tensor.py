"""Overhead of `parallelize` over the same plan written with torch, both on plain Gloo under torchrun."""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional

from axon_nb.parallel import parallel_cross_entropy, parallelize
from axon_nb.parallel.models import GPT, GPTConfig, next_byte_loss
from benchmarks.collectives import Arms, pairs_of
from benchmarks.pairs import PairedRow
from benchmarks.report import write

KINDS = ("plain", "sequence")
CONFIG = GPTConfig(context=128, hidden=256, heads=8, blocks=4)
BATCH = 8
TIME, MEMORY = 1.02, 1.01
MEMORY_STEPS = 3


def model_here() -> GPT:
    """The model, the same on all ranks."""
    torch.manual_seed(0)
    return GPT(CONFIG)


def ours(kind: str, mesh: DeviceMesh) -> Callable[[], object]:
    """A step of a model sharded by `parallelize`."""
    model = model_here()
    parallelize(model, "auto", mesh=mesh, sequence=kind == "sequence", parallel_loss=kind == "sequence")

    def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> None:
        loss = parallel_cross_entropy if kind == "sequence" else next_byte_loss
        loss(logits, targets).backward()

    return stepper(model, loss_of)


def torchs(kind: str, mesh: DeviceMesh) -> Callable[[], object]:
    """A step of the same model, sharded by torch's own calls."""
    model = model_here()
    whole, positions = Replicate(), Shard(1)
    between = positions if kind == "sequence" else whole
    shared = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(whole,), use_local_output=False)
    for block in (child for name, child in model.named_children() if name.startswith("block")):
        plan = {
            "attention": shared,
            "attention.query": ColwiseParallel(),
            "attention.key": ColwiseParallel(),
            "attention.value": ColwiseParallel(),
            "attention.out": RowwiseParallel(output_layouts=between),
            "up": ColwiseParallel(input_layouts=between),
            "down": RowwiseParallel(output_layouts=between),
        }
        if kind == "sequence":
            plan |= {"norm1": SequenceParallel(use_local_output=True), "norm2": SequenceParallel(use_local_output=True)}
        parallelize_module(block, mesh, plan)
    if kind == "plain":
        parallelize_module(model, mesh, {"head.logits": ColwiseParallel(output_layouts=whole)})

        def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> None:
            next_byte_loss(logits, targets).backward()
    else:
        parallelize_module(
            model,
            mesh,
            {
                "embedding": PrepareModuleOutput(output_layouts=whole, desired_output_layouts=positions),
                "head.norm": SequenceParallel(use_local_output=True),
                "head.logits": ColwiseParallel(input_layouts=positions, use_local_output=False),
            },
        )

        def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> None:
            with loss_parallel():
                functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()

    return stepper(model, loss_of)


def stepper(model: nn.Module, loss_of: Callable[[torch.Tensor, torch.Tensor], None]) -> Callable[[], object]:
    """A training step on a fixed batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    drawn = torch.randint(256, (BATCH, CONFIG.context + 1), generator=torch.Generator().manual_seed(1))

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model(drawn[:, :-1]), drawn[:, 1:])
        optimizer.step()

    return step


def arms(kind: str, mesh: DeviceMesh) -> Arms:
    """Our step and torch's."""
    return ours(kind, mesh), torchs(kind, mesh)


def rank_side(out: Path, *, what: str, pairs: int, budget_s: float) -> None:
    """Run on each rank: measure all pairs of times, or the peak memory of one arm; rank 0 writes it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    measured: object
    if what == "times":
        measured = {kind: pairs_of(arms(kind, mesh), pairs=pairs, budget_s=budget_s) for kind in KINDS}
    else:
        arm, kind = what.split()
        step = (ours if arm == "ours" else torchs)(kind, mesh)
        for _ in range(MEMORY_STEPS):
            step()
        measured = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if dist.get_rank() == 0:
        out.write_text(json.dumps(measured))
    dist.destroy_process_group()


def launch(what: str, *, pairs: int, quick: bool) -> object:
    """Run two ranks and return what rank 0 measured."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "measured.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        own = ["-m", "benchmarks.tensor", f"--rank-side={out}", f"--what={what}", f"--pairs={pairs}"]
        subprocess.run([*launcher, *own, *(["--quick"] if quick else [])], check=True)
        return json.loads(out.read_text())


def rows_of(*, pairs: int, quick: bool) -> list[PairedRow]:
    """Build the table's rows: time from pairs in one run, memory from separate, alternating processes."""
    times = launch("times", pairs=pairs, quick=quick)
    assert isinstance(times, dict)
    rows = []
    for kind in KINDS:
        row = PairedRow.of_ratios(f"step of a GPT, {kind}", times[kind], TIME)
        rows.append(dataclasses.replace(row, peer="torch alone"))
        peaks = []
        for number in range(1 if quick else 5):
            order = ("ours", "torch") if number % 2 else ("torch", "ours")
            found = {arm: launch(f"{arm} {kind}", pairs=1, quick=quick) for arm in order}
            peaks.append((found["ours"], found["torch"]))
        megabytes = [(ours / 1024, peer / 1024) for ours, peer in peaks]
        # `of_ratios` takes seconds and shows thousandths of them.
        row = PairedRow.of_ratios(f"peak memory, {kind}", [(a / 1e3, b / 1e3) for a, b in megabytes], MEMORY)
        rows.append(dataclasses.replace(row, peer="torch alone", unit="MiB"))
    return rows


def main() -> None:
    """Measure on 2 ranks with 1 thread each, print the table and write it to benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few pairs, as a smoke test")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--rank-side", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--what", default="times", help=argparse.SUPPRESS)
    options = parser.parse_args()
    pairs, budget_s = (4, 0.01) if options.quick else (options.pairs, 0.5)
    if options.rank_side is not None:
        rank_side(options.rank_side, what=options.what, pairs=pairs, budget_s=budget_s)
        return
    print(write("tensor", rows_of(pairs=pairs, quick=options.quick), options.out))


if __name__ == "__main__":
    main()
