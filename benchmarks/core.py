"""What a cell, a start and a rank cost: this working tree, the commit that landed last and `%%px`, alternating.

Run `make bench-core` on an otherwise idle machine: eight minutes at most. CPU times hold on a busy machine too,
wall times do not. Measured in real kernels, from outside: the CPU clocks and the memory of all processes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from axon_nb.records.environment import PYTHON_PATH
from benchmarks import stock
from benchmarks.report import Row, median, percentile, write
from tests.support.kernel import Kernel

ROOT = Path(__file__).parents[1]
ALL_REDUCE = "%%distributed\n_x = torch.ones(1)\ndist.all_reduce(_x)"
BLOCK = 25
"""Cells in a row, before it is another tool's turn."""
SETTLE_S = 4.0
"""Ranks test themselves in children after a start; when for so long none has ended, memory is measured."""
TARGETS = {
    "empty cell, wall, 4 ranks": 0.60,
    "empty cell, wall, 8 ranks": 0.50,
    "CPU of an empty cell, each rank, 4 ranks": 0.60,
    "CPU of an empty cell, notebook, 4 ranks": 0.60,
    "cold start to the first all_reduce, 4 ranks": 0.25,
    "cold start to the first all_reduce, 8 ranks": 0.18,
    "memory (PSS) of all processes but the notebook, 8 ranks": 0.30,
}
"""By measure, the largest ratio to `%%px`."""
LIMITS = {"a rank's own memory (USS), 4 ranks": 36.0, "modules of a rank, 4 ranks": 1600.0}


@dataclass(frozen=True)
class Tool:
    """One way to run cells on ranks."""

    name: str
    path: Path | None
    """The folder that holds axon_nb; None: stock ipyparallel."""

    @property
    def cell(self) -> str:
        """The magic of a cell."""
        return "%%px" if self.path is None else "%%distributed"

    def cells_to_start(self, n: int) -> Sequence[str]:
        """Return the cells up to and with the first collective."""
        if self.path is None:
            return stock.START.format(n=n), stock.ALL_REDUCE
        return "%load_ext axon_nb", f"%distributed start -n {n}", ALL_REDUCE

    @contextlib.contextmanager
    def kernel(self) -> Iterator[Kernel]:
        """Start a kernel that imports this tool, and stop its cluster at the end."""
        with tempfile.TemporaryDirectory() as folder:
            env = {} if self.path is None else {PYTHON_PATH.name: str(self.path)}
            with Kernel(cwd=Path(folder), env=env) as kernel:
                yield kernel
                kernel.run(stock.STOP if self.path is None else "%distributed stop", timeout=120)


@contextlib.contextmanager
def tools(base: str) -> Iterator[list[Tool]]:
    """Yield this working tree, a commit, and stock ipyparallel."""
    with tempfile.TemporaryDirectory() as name:
        archive = subprocess.run(
            ["git", "archive", base, "axon_nb", "magics"], cwd=ROOT, capture_output=True, check=False
        )
        if archive.returncode:
            raise SystemExit(f"The commit {base} is not in this clone: fetch it, or name another with --base.")
        subprocess.run(["tar", "-x", "-C", name], input=archive.stdout, check=True)
        yield [Tool("this tree", ROOT), Tool(base[:8], Path(name)), Tool("%%px", None)]


def processes(kernel: Kernel) -> dict[str, list[int]]:
    """Return the pids by what the processes are; helpers of a rank count as that rank."""
    found = defaultdict(list, notebook=[kernel.pid])

    def add(process: psutil.Process, parent: str) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            command = " ".join(process.cmdline())
            if (
                parent == "rank"
                or "ipyparallel.engine" in command
                or (parent == "agent" and "axon_nb.host " in command)
            ):
                kind = "rank"
            else:
                kind = "agent" if "axon_nb.host " in command else "controller"
            found[kind].append(process.pid)
            for child in process.children():
                add(child, kind)

    for child in psutil.Process(kernel.pid).children():
        add(child, "notebook")
    return found


def cpu_ms(pids: Iterable[int], *, ended: bool = False) -> float:
    """CPU time of processes that run, all threads, in milliseconds; with `ended` also of children that have ended."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            # Linux: the clock of a process, its id as in clock_getcpuclockid(3); /proc/PID/stat counts in 10 ms.
            total += time.clock_gettime(~pid << 3 | 2)
            times = psutil.Process(pid).cpu_times()
            total += times.children_user + times.children_system if ended else 0.0
    return total * 1e3


def cold_start(tool: Tool, n: int, *, memory: bool = False) -> dict[str, float]:
    """Start ranks in a fresh kernel, up to the first all_reduce; return seconds, CPU seconds, and the memory then."""
    with tool.kernel() as kernel:
        before, began = cpu_ms([kernel.pid], ended=True), time.perf_counter()
        for code in tool.cells_to_start(n):
            kernel.ok(code, timeout=240)
        found = {"wall": time.perf_counter() - began}
        pids = [pid for each in processes(kernel).values() for pid in each]
        found["cpu"] = (cpu_ms(pids, ended=True) - before) / 1e3
        if memory:
            _settle(kernel)
            found |= _memory(kernel, tool)
    return found


def _settle(kernel: Kernel) -> dict[str, list[int]]:
    """Wait until no process starts or ends any more; return those that there are."""
    before, end = processes(kernel), time.monotonic() + 10 * SETTLE_S
    while time.monotonic() < end:
        time.sleep(SETTLE_S)
        if (now := processes(kernel)) == before:
            break
        before = now
    return before


def _memory(kernel: Kernel, tool: Tool) -> dict[str, float]:
    ranks = [psutil.Process(pid).memory_full_info().uss for pid in processes(kernel)["rank"]]
    reply = kernel.ok(f"{tool.cell}\nimport sys\nprint('modules', len(sys.modules))")
    shown = reply.stdout + "".join(display.get("text/plain", "") for display in reply.displays)
    modules = max(map(int, re.findall(r"modules (\d+)", shown)))
    return {"pss": pss_mib(kernel), "uss": max(ranks) / 2**20, "modules": modules}


def pss_mib(kernel: Kernel) -> float:
    """Proportional set size (MiB) of all processes that the kernel started."""
    pids = [pid for kind, each in processes(kernel).items() if kind != "notebook" for pid in each]
    return float(sum(psutil.Process(pid).memory_full_info().pss for pid in pids) / 2**20)


def rounds(most: int, end: float, *, least: int = 1) -> Iterator[int]:
    """Count rounds while there is time for one more, as long as the longest so far."""
    longest = 0.0
    for number in range(most):
        began = time.monotonic()
        if number >= least and began + longest > end:
            return
        yield number
        longest = max(longest, time.monotonic() - began)


def empty_cells(choice: Sequence[Tool], n: int, blocks: int, end: float) -> dict[str, dict[str, list[float]]]:
    """Run empty cells in turns; return by tool and process milliseconds per cell: of CPU by block, of wall by cell."""
    found: dict[str, dict[str, list[float]]] = {tool.name: defaultdict(list) for tool in choice}
    with contextlib.ExitStack() as stack:
        kernels = {tool: stack.enter_context(tool.kernel()) for tool in choice}
        for tool, kernel in kernels.items():
            for code in (*tool.cells_to_start(n), *[f"{tool.cell}\npass"] * BLOCK):
                kernel.ok(code, timeout=240)
        pids = {tool: _settle(kernel) for tool, kernel in kernels.items()}
        for block in rounds(blocks, end, least=2):
            for tool in choice if block % 2 else reversed(choice):
                mine = found[tool.name]
                before = {kind: cpu_ms(each) for kind, each in pids[tool].items()}
                mine["wall"] += [kernels[tool].ok(f"{tool.cell}\npass").seconds * 1e3 for _ in range(BLOCK)]
                spent = {kind: (cpu_ms(each) - before[kind]) / BLOCK for kind, each in pids[tool].items()}
                for kind, value in {**spent, "all": sum(spent.values())}.items():
                    mine[kind].append(value / n if kind == "rank" else value)
    return found


def compared(measure: str, values: Mapping[str, float], unit: str) -> list[Row]:
    """Return a row for each peer that has this."""
    (_, ours), *peers = values.items()
    targets = {"%%px": TARGETS.get(measure)}
    rows = [Row(measure, ours, unit, name, value, targets.get(name)) for name, value in peers]
    return [*rows, Row(measure, ours, unit, limit=LIMITS[measure])] if measure in LIMITS else rows


def cell_rows(choice: Sequence[Tool], n: int, blocks: int, end: float) -> list[Row]:
    """Measure empty cells on so many ranks."""
    found = empty_cells(choice, n, blocks, end)

    def rows(measure: str, kind: str, value: Callable[[Sequence[float]], float] = median) -> list[Row]:
        return compared(
            f"{measure}, {n} ranks", {name: value(each[kind]) for name, each in found.items() if kind in each}, "ms"
        )

    return [
        *rows("empty cell, wall", "wall"),
        *rows("empty cell, wall, 95 %", "wall", lambda each: percentile(each, 95)),
        *rows("CPU of an empty cell, notebook", "notebook"),
        *rows("CPU of an empty cell, each rank", "rank"),
        *rows("CPU of an empty cell, controller", "controller"),
        *rows("CPU of an empty cell, agent", "agent"),
        *rows("CPU of an empty cell, all processes", "all"),
    ]


def start_rows(choice: Sequence[Tool], n: int, most: int, end: float) -> list[Row]:
    """Measure cold starts of so many ranks, and what the ranks hold then."""
    found: dict[str, dict[str, list[float]]] = {tool.name: defaultdict(list) for tool in choice}
    for number in rounds(most, end):
        for tool in choice if number % 2 else reversed(choice):
            for kind, value in cold_start(tool, n, memory=number == 0).items():
                found[tool.name][kind].append(value)
    names = {
        "wall": ("cold start to the first all_reduce", "s"),
        "cpu": ("the same, CPU of all processes", "s"),
        "pss": ("memory (PSS) of all processes but the notebook", "MiB"),
        "uss": ("a rank's own memory (USS)", "MiB"),
        "modules": ("modules of a rank", ""),
    }
    return [
        row
        for kind, (name, unit) in names.items()
        for row in compared(f"{name}, {n} ranks", {tool: median(each[kind]) for tool, each in found.items()}, unit)
    ]


def main() -> None:
    """Measure everything, print the table and write it to benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds with 4 ranks, as a smoke test")
    parser.add_argument(
        "--base", default=(ROOT / ".ci" / "landed").read_text().strip(), help="a commit to compare with"
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="how long it may take: it repeats less often then")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    os.environ.pop("PYTEST_CURRENT_TEST", None)
    began = time.monotonic()
    with tools(options.base) as choice:
        rows: list[Row] = []
        steps = [(cell_rows, 4, 10), (start_rows, 4, 4), (cell_rows, 8, 6), (start_rows, 8, 3)]
        for number, (measure, n, repeats) in enumerate(steps[:2] if options.quick else steps):
            end = began + options.minutes * 60 * (number + 1) / len(steps)
            rows += measure(choice, n, min(2, repeats) if options.quick else repeats, end)
    print(write("core", rows, options.out))
    print(f"took {(time.monotonic() - began) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
