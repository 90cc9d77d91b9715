"""Moving 256 MiB to four ranks and back, against stock ipyparallel in the same run: speed, peak and retained memory.

Run `python -m benchmarks.data [--quick]` in the project's folder, on an otherwise idle machine: memory is measured for
the whole machine.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from benchmarks import stock
from benchmarks.core import pss_mib
from benchmarks.report import Row, median, write
from tests.support.kernel import Kernel

RANKS = 4
MEBIBYTES = 256
SIZE = MEBIBYTES << 20
KINDS = {
    "NumPy": f"import numpy as np\nx = np.random.default_rng(0).random({SIZE} // 8)",
    "tensor": f"import torch\nx = torch.rand({SIZE} // 4)",
}
TIMED = "import time\n_t = time.perf_counter()\n{code}\n_t = time.perf_counter() - _t"
OURS = {"push": "%push x", "pull": "%pull x --ranks 0 --as y --force"}
THEIRS = {"push": "rc[:].push(dict(x=x), block=True);", "pull": "y = rc[0].pull('x', block=True)"}
FORGET = "y = None\n{purge}\nimport gc; _ = gc.collect()"


def used_bytes() -> int:
    """Memory of all processes plus shared memory on this machine, in bytes, without file caches."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return sum(int(fields[name].split()[0]) << 10 for name in ("AnonPages", "Shmem"))


@contextmanager
def peak() -> Iterator[list[int]]:
    """Sample used memory; the list holds the peak above the start, in bytes."""
    start, highest, over = used_bytes(), [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.002):
            highest[0] = max(highest[0], used_bytes() - start)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield highest
    finally:
        over.set()
        thread.join()


def seconds(kernel: Kernel, code: str) -> float:
    """Seconds that a cell's code takes in the kernel."""
    kernel.ok(TIMED.format(code=code), timeout=120)
    return float(kernel.value("_t"))


def measure(kind: str, rounds: int) -> list[Row]:
    """Measure ours and theirs alternately, each in its own kernel."""
    times: dict[str, list[float]] = {f"{who} {what}": [] for who in ("our", "their") for what in OURS}
    with Kernel() as ours, Kernel() as peer:
        ours.ok(f"%load_ext axon_nb\n%distributed start -n {RANKS}", timeout=120)
        peer.ok(stock.START.format(n=RANKS), timeout=180)
        peer.ok(stock.ALL_REDUCE, timeout=120)
        for kernel in (ours, peer):
            kernel.ok(KINDS[kind], timeout=120)
        ours.ok("%%distributed\nx = y = None")
        for _ in range(rounds + 1):
            for what, code in OURS.items():
                times[f"our {what}"].append(seconds(ours, code))
                times[f"their {what}"].append(seconds(peer, THEIRS[what]))
            peer.ok(FORGET.format(purge="rc.purge_local_results('all')"))
            ours.ok(FORGET.format(purge=""))
            ours.ok("%%distributed\nx = None")
        peer.run(stock.STOP, timeout=120)
        ratios = _peaks(ours, rounds)
        left = _left(ours, rounds)
        ours.ok("%distributed stop")
    rates = {what: [1 / value for value in values[1:]] for what, values in times.items()}
    return [*_speeds(kind, rates), *_memory(kind, ratios, left)]


def _peaks(kernel: Kernel, rounds: int) -> dict[str, list[float]]:
    """Peak memory above the start in each transfer, relative to the data; nothing else of ours runs."""
    ratios: dict[str, list[float]] = {what: [] for what in OURS}
    for _ in range(rounds):
        for what, code in OURS.items():
            with peak() as highest:
                kernel.ok(code, timeout=120)
            ratios[what].append(highest[0] / SIZE)
        kernel.ok(FORGET.format(purge=""))
        kernel.ok("%%distributed\nx = None")
    return ratios


def _left(kernel: Kernel, rounds: int) -> float:
    """Memory retained after that many transfers, relative to the size of one."""
    before = _resident(kernel)
    for _ in range(max(3, rounds)):
        for code in OURS.values():
            kernel.ok(code, timeout=120)
        kernel.ok(FORGET.format(purge=""))
        kernel.ok("%%distributed\nx = None\nimport gc; _ = gc.collect()")
    return (_resident(kernel) - before) / SIZE


def _resident(kernel: Kernel) -> float:
    """Memory of a kernel and all its children in bytes; shared memory counts once."""
    own = psutil.Process(kernel.pid).memory_full_info().pss
    return own + pss_mib(kernel) * 2**20


def _speeds(kind: str, rates: dict[str, list[float]]) -> list[Row]:
    ours = {what: SIZE / 1e9 * median(rates[f"our {what}"]) for what in OURS}
    theirs = {what: SIZE / 1e9 * median(rates[f"their {what}"]) for what in OURS}
    # Ratios of times: "8 times as fast" means at most 1/8.
    return [
        Row(f"push to {RANKS} ranks, {kind}", SIZE / 1e9 / ours["push"], "s", "ipyparallel",
            SIZE / 1e9 / theirs["push"], 1 / 8, note=f"{RANKS * ours['push']:.2f} GB/s in all"),
        Row(f"the same, seconds per GB in all, {kind}", 1 / (RANKS * ours["push"]), "s", limit=1 / 3),
        Row(f"pull from one rank, {kind}", SIZE / 1e9 / ours["pull"], "s", "ipyparallel",
            SIZE / 1e9 / theirs["pull"], 1 / 3, note=f"{ours['pull']:.2f} GB/s"),
        Row(f"the same, seconds per GB, {kind}", 1 / ours["pull"], "s", limit=1.0),
    ]  # fmt: skip


def _memory(kind: str, ratios: dict[str, list[float]], left: float) -> list[Row]:
    return [
        Row(f"peak memory above the start while pushing, {kind}", median(ratios["push"]), "x the data", limit=1.2,
            note=f"at most {max(ratios['push']):.2f}"),
        Row(f"peak memory above the start while pulling, {kind}", median(ratios["pull"]), "x the data", limit=1.2,
            note=f"at most {max(ratios['pull']):.2f}"),
        Row(f"kept after several transfers, {kind}", max(0.0, left), "x the data", limit=0.05),
    ]  # fmt: skip


def main() -> None:
    """Run all measurements, print the table and write it to benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds, as a smoke test")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    rounds = 2 if options.quick else 10
    rows = [row for kind in KINDS for row in measure(kind, rounds)]
    print(write("data", rows, options.out))


if __name__ == "__main__":
    main()
