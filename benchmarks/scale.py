"""What a cluster of 1,024 ranks on 128 hosts costs the notebook's process, from synthetic streams: no rank runs.

Run `python -m benchmarks.scale`. Each row feeds one part of the notebook's side what so many ranks send in a second,
and counts the CPU seconds of this process and the memory that Python's objects take at most.
"""

from __future__ import annotations

import argparse
import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from axon_nb.cluster.inspection.spans import SpanStore
from axon_nb.cluster.inspection.status import cluster_card
from axon_nb.cluster.output.cell_output import CellOutput
from axon_nb.cluster.output.sinks import RecordingSink
from axon_nb.records.spans import Span
from axon_nb.records.stacks import RankStack, StackFrame, Stacks
from axon_nb.records.telemetry import Activity, ClusterInfo, RankInfo, RankState
from axon_nb.records.waits import PendingCall, RankWaits, describe_slow_ranks, explain_deadlock
from axon_nb.widgets.cell.views import RankStrip
from axon_nb.widgets.timeline.content import page_facts, summarize
from benchmarks.report import Row, write

RANKS, RANKS_PER_HOST = 1024, 8
POLLS_PER_S = 1 / 0.3
"""Of the search for deadlocks."""
SAMPLES_PER_S = 4
FLUSHES_PER_S = 10
SPANS_PER_S = 20
"""Per rank: steps of a quarter of a second with five spans each."""
LINES_PER_S = 4
"""Per rank."""


def waits(size: int) -> dict[int, RankWaits]:
    """Every rank but one waits in a collective."""
    ranks = tuple(range(size))
    call = PendingCall(7, "allreduce", "0", ranks, 9, -1, 4096, 5.0)
    reports = {rank: RankWaits(rank, True, 3, "all_reduce", (call,), {"0": 9}) for rank in ranks}
    return reports | {size // 2: RankWaits(size // 2, True, 7, "", (), {"0": 8})}


def observe(size: int, seconds: int) -> None:
    """Search for deadlocks and slow ranks, as while a cell runs."""
    reports = waits(size)
    for _ in range(round(seconds * POLLS_PER_S)):
        assert explain_deadlock(reports, range(size), 0.5) is None
        assert describe_slow_ranks(reports, 3.0)


def watch(size: int, seconds: int) -> None:
    """Show the strip of `--watch`: half of the ranks compute, half are in a collective, taking turns."""
    strip = RankStrip(range(size), title="In [1]")
    for tick in range(seconds * FLUSHES_PER_S):
        now = time.monotonic_ns()
        for rank in range(size):
            if (tick + rank) * SAMPLES_PER_S % FLUSHES_PER_S < SAMPLES_PER_S:
                computes = (tick // 5 + rank) % 2
                activity = Activity.RUNNING if computes else Activity.COLLECTIVE
                call = "" if computes else "all_reduce"
                strip.add([RankState(rank, activity, now, cell=1, line=4, call=call, since_ns=now)])
        strip.flush()
    assert strip.to_bundle()


def trace(size: int, seconds: int) -> None:
    """Store the spans of a timeline, and compute its facts twice a second, as an open view does."""
    store = SpanStore()
    store.set_groups({"0": tuple(range(size))})
    period = 10**9 // (SPANS_PER_S // 5)
    kinds = ("forward", "backward", "collective", "optimizer", "other")
    for step in range(seconds * SPANS_PER_S // 5):
        for rank in range(size):
            begin = step * period
            store.add(
                Span(
                    kind=kind, name="all_reduce" if kind == "collective" else kind, rank=rank, start_ns=begin + part,
                    end_ns=begin + part + period // 6, group="0" if kind == "collective" else "", sequence=step + 1,
                )
                for part, kind in zip(range(0, period, period // 5), kinds, strict=False)
            )  # fmt: skip
        if step % 2:
            assert page_facts(summarize(store.table()), range(size))


def show_output(size: int, seconds: int, *, alike: bool) -> None:
    """Show what ranks print: the same lines, or a line of its own each."""
    output = CellOutput(range(size), RecordingSink())
    for step in range(seconds * LINES_PER_S):
        for rank in range(size):
            text = f"step {step}\n" if alike else f"step {step}: loss {rank * 0.001:.3f}\n"
            output.feed(rank, "stream", {"name": "stdout", "text": text}, {})
        output.flush()
    output.flush(final=True)


def states(size: int) -> Iterator[RankInfo]:
    """One record per rank; one rank computes."""
    for rank in range(size):
        state = "running line 7" if rank == size // 2 else f"waiting in all_reduce at line 4, for {rank % 9}.1 s"
        host = f"node{rank // RANKS_PER_HOST:03d}"
        yield RankInfo(rank, host, 1000 + rank, f"cuda:{rank % 8}", "nccl", state, (rank + 1) << 20, 1 << 30, 4)


def draw_status(size: int, seconds: int) -> None:
    """Render the card of the cluster once per second, and stacks."""
    ranks = tuple(states(size))
    hosts = ", ".join(dict.fromkeys(row.host for row in ranks))
    info = ClusterInfo("large", "nccl", hosts, size, True, "axon", ranks)
    frames = (StackFrame("Cell In[4], line 4", "dist.all_reduce(x)"),)
    for _ in range(seconds):
        assert len(cluster_card(info)["text/plain"].splitlines()) < 10
        assert len(repr(Stacks({row.rank: RankStack(row.state, frames) for row in ranks})).splitlines()) < 50


PARTS: dict[str, Callable[[int, int], Any]] = {
    "search for deadlocks and slow ranks": observe,
    "strip of `--watch`": watch,
    "spans and facts of a timeline": trace,
    f"output, {LINES_PER_S} equal lines per rank": lambda size, seconds: show_output(size, seconds, alike=True),
    f"output, {LINES_PER_S} distinct lines per rank": lambda size, seconds: show_output(size, seconds, alike=False),
    "status card and stacks": draw_status,
}


def measure(part: Callable[[int, int], Any], size: int, seconds: int) -> tuple[float, int]:
    """Return CPU seconds per second of the stream, and the most bytes that Python's objects took."""
    part(32, 1)  # imports
    gc.collect()
    began = time.process_time()
    part(size, seconds)
    cpu = (time.process_time() - began) / seconds
    tracemalloc.start()
    part(size, 1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return cpu, peak


def main() -> None:
    """Measure all parts, print the table and write it to benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    rows = []
    for name, part in PARTS.items():
        cpu, peak = measure(part, options.ranks, options.seconds)
        smaller, _ = measure(part, options.ranks // 4, options.seconds)
        note = f"at most {peak / 2**20:.0f} MiB of Python's objects in a second of the stream"
        rows.append(Row(name, cpu, "CPU s/s", f"4 × {options.ranks // 4} ranks", 4 * smaller, 2.0, note))
    print(write("scale", rows, options.out))


if __name__ == "__main__":
    main()
