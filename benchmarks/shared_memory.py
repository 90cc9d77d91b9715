"""The groups of a cluster, over shared memory, against Gloo as torchrun starts it, measured in turn.

The limit of a call is the time of the copies that it cannot do without, made by all ranks at once on tensors of the
same size: a rank copies its data into memory that others read, and theirs out of it.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.pairs import PairedRow
from benchmarks.report import write

ROOT = Path(__file__).resolve().parents[1]
KIB, MIB = 1 << 10, 1 << 20
SIZES = (4, 64 * KIB, MIB, 16 * MIB, 64 * MIB)
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send and recv")
COPIES: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 1 + (n - 1) / n + (n + 1) / (2 * n),
    "all_gather": lambda n: n + 1,
    "reduce_scatter": lambda n: (n - 1) / n + (n + 1) / (2 * n),
    "broadcast": lambda n: 1,
    "send and recv": lambda n: 2,
}
"""How often a rank copies its tensor at least, by number of ranks; a sum of n values counts as (n + 1) / 2 copies."""
SAMPLES, POSITIONS, FEATURES = 4, 8192, 64
"""Of the attention, which has one head."""
Call = Callable[[], object]


@functools.lru_cache(maxsize=1)
def call_of(name: str, size: int, dtype: str) -> Call:
    """One operation on tensors of `size` bytes, or a training step."""
    if name.startswith("step"):
        return step_of(name)
    if "attention" in name:
        return attention_of(name)
    n, rank, kind = dist.get_world_size(), dist.get_rank(), getattr(torch, dtype)
    count = size // kind.itemsize
    tensor = torch.ones(max(n, count // n * n) if name == "reduce_scatter" else count, dtype=kind)
    part = torch.ones(tensor.numel() // n or 1, dtype=kind)
    whole = torch.ones(tensor.numel() * n if name == "all_gather" else tensor.numel(), dtype=kind)

    def both_ways() -> None:
        if rank == 0:
            dist.send(tensor, 1)
            dist.recv(tensor, 1)
        elif rank == 1:
            dist.recv(tensor, 0)
            dist.send(tensor, 0)

    # As tokens travel to experts: to the next rank the least, to this one the most.
    shares = [[1 + (source - target) % n for target in range(n)] for source in range(n)]
    sent, received = (
        [count // sum(row) * share for share in row] for row in (shares[rank], [*zip(*shares, strict=True)][rank])
    )
    visits, arrived = tensor[: sum(sent)], torch.empty(sum(received), dtype=kind)
    return {
        "all_to_all of experts": lambda: dist.all_to_all_single(arrived, visits, received, sent),
        "all_reduce": lambda: dist.all_reduce(tensor, dist.ReduceOp.MAX),
        "all_gather": lambda: dist.all_gather_single(whole, tensor),
        "reduce_scatter": lambda: dist.reduce_scatter_single(part, tensor),
        "broadcast": lambda: dist.broadcast(tensor, 0),
        "send and recv": both_ways,
        "copy": lambda: whole.copy_(tensor),
    }[name]


def attention_of(name: str) -> Call:
    """Causal attention and its backward: of a sequence split over the ranks, or of half of it with nothing sent."""
    from torch.nn.functional import scaled_dot_product_attention

    from axon_nb.parallel import ContextParallel

    n = dist.get_world_size()
    count = POSITIONS // n if name == "ring attention" else POSITIONS
    tensors = [torch.randn(SAMPLES, 1, count, FEATURES, requires_grad=True) for _ in range(3)]
    if name != "ring attention":
        return lambda: scaled_dot_product_attention(*tensors, is_causal=True).sum().backward()
    context = ContextParallel(POSITIONS)

    def ring() -> None:
        with context:
            scaled_dot_product_attention(*tensors, is_causal=True).sum().backward()

    return ring


def step_of(name: str) -> Call:
    """A training step of a small model."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)])
    if name.endswith("DDP"):
        model: nn.Module = DistributedDataParallel(plain)
    else:
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in plain:
            fully_shard(layer, mesh=mesh)
        model = fully_shard(plain, mesh=mesh)
    optimizer, data = torch.optim.SGD(model.parameters(), lr=1e-4), torch.randn(64, 512)

    def step() -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    return step


def seconds(name: str, size: int, dtype: str, count: int) -> float:
    """Seconds per call; runs on all ranks."""
    call = call_of(name, size, dtype)
    call()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


Measure = Callable[..., float]


@contextmanager
def cluster(size: int) -> Iterator[Measure]:
    """Measure on the ranks of a cluster."""
    import axon_nb

    ranks = axon_nb.start(size, devices="cpu")
    try:
        ranks.run(f"import sys, torch\nsys.path.insert(0, {str(ROOT)!r})\nfrom benchmarks import shared_memory")
        ranks.run("torch.set_num_threads(1)", quiet=True)
        yield lambda *arguments: ranks.run(f"shared_memory.seconds(*{arguments!r})", quiet=True).values[0]
    finally:
        ranks.stop()


def rank_side(rank: int, size: int, store: str) -> None:
    """Run on each rank of `torchrun`: rank 0 answers each line of arguments with the seconds."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    for line in sys.stdin:
        answer = seconds(*json.loads(line))
        if rank == 0:
            print(answer, flush=True)
    os._exit(0)


@contextmanager
def torchrun(size: int) -> Iterator[Measure]:
    """Measure on ranks without a notebook, over Gloo."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-Wignore", "-m", "benchmarks.shared_memory"]
        ranks = [
            subprocess.Popen(
                [*command, "--rank-side", str(rank), str(size), f"{folder}/store"],
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]

        def measure(*arguments: object) -> float:
            for process in ranks:
                assert process.stdin is not None
                process.stdin.write(json.dumps(arguments) + "\n")
                process.stdin.flush()
            assert ranks[0].stdout is not None
            return float(ranks[0].stdout.readline())

        try:
            yield measure
        finally:
            for process in ranks:
                process.communicate()


def pairs_of(
    name: str, size: int, dtype: str, arms: tuple[Measure, Measure], *, pairs: int, budget_s: float
) -> list[tuple[float, float]]:
    """Seconds in turn: ours and theirs."""
    once = max(measure(name, size, dtype, 2) for measure in arms)
    count = max(1, min(300, int(budget_s / once)))
    rows = []
    for number in range(pairs):
        order = arms if number % 2 else arms[::-1]
        times = [measure(name, size, dtype, count) for measure in order]
        rows.append((times[0], times[1]) if number % 2 else (times[1], times[0]))
    return rows


def rows_of(size: int, *, pairs: int, budget_s: float) -> Iterator[PairedRow]:
    """The rows of one number of ranks."""
    with cluster(size) as ours, torchrun(size) as gloo:
        for name in OPERATIONS:
            for count in SIZES:
                for dtype in ("float32", "bfloat16") if "reduce" in name and count >= 16 * MIB else ("float32",):
                    words = f"{size} ranks, {name} of {count:,} B{'' if dtype == 'float32' else ', ' + dtype}"
                    times = pairs_of(name, count, dtype, (ours, gloo), pairs=pairs, budget_s=budget_s)
                    yield PairedRow.of_ratios(words, times, 0.4)
                    if count >= 16 * MIB:
                        copies = [gloo("copy", count, dtype, 3) * COPIES[name](size) for _ in times]
                        bounded = [(our, limit) for (our, _), limit in zip(times, copies, strict=True)]
                        yield PairedRow.of_ratios(words, bounded, 1.3, peer="copies")
        for name in ("step of DDP", "step of FSDP2"):
            times = pairs_of(name, 0, "float32", (ours, gloo), pairs=pairs, budget_s=budget_s)
            yield PairedRow.of_ratios(f"{size} ranks, a {name}", times, 0.9)


def travel_rows(size: int, *, pairs: int, budget_s: float) -> Iterator[PairedRow]:
    """The rows of what tokens send: to experts over Gloo's time, and around a ring over the compute and the copies."""
    with cluster(size) as ours, torchrun(size) as gloo:
        for count in SIZES[1:]:
            name = "all_to_all of experts"
            times = pairs_of(name, count, "float32", (ours, gloo), pairs=pairs, budget_s=budget_s)
            yield PairedRow.of_ratios(f"{size} ranks, {name}, {count:,} B", times, 0.6)
        part = 2 * SAMPLES * POSITIONS // size * FEATURES * 4
        # Keys and values once in forward and once in backward, and their gradients once more than that.
        copies = 2 * ((size - 1) * 2 + size)
        bounded = []
        for _ in range(pairs):
            compute = ours("whole attention", 0, "float32", 1) / size
            limit = compute + copies * ours("copy", part, "float32", 3)
            bounded.append((ours("ring attention", 0, "float32", 1), limit))
        words = f"{size} ranks, ring attention of {SAMPLES} x {POSITIONS:,} tokens"
        yield PairedRow.of_ratios(words, bounded, 1.15, peer="a rank's compute and copies")


def main() -> None:
    """Measure on 2 and 4 ranks with 1 thread each, print the table and write it to benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--budget", type=float, default=0.05, help="seconds of one measurement")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--rank-side", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_side:
        rank, size, store = options.rank_side
        rank_side(int(rank), int(size), store)
        return
    rows = [row for size in options.ranks for row in rows_of(size, pairs=options.pairs, budget_s=options.budget)]
    rows += [row for size in options.ranks for row in travel_rows(size, pairs=options.pairs, budget_s=options.budget)]
    print(write("shared_memory", rows, options.out))


if __name__ == "__main__":
    main()
