"""What an empty cell and a start cost, in counts: a real kernel, and a real cluster of two ranks.

A cell's window begins when the cell is sent, and includes what follows the cell. What timers do falls into some windows
and not into others; so each function, socket and system call counts as often as in the window with the fewest. Waiting
for a lock is not counted.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from axon_nb.records.environment import AGENT_SERVER, PYTHON_PATH, WARM_UP
from tests.support.kernel import Kernel
from tests.support.processes import Footprint, footprint, until

Costs = dict[str, dict[str, float]]
"""By kind, such as "cell.calls", and by what it is a cost of."""

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "ipyparallel", "ipykernel", "ipython", "jupyter_client", "pyzmq", "tornado", "traitlets")
EMPTY = "%%distributed\npass"
RANKS = 2
WINDOW_S = 0.6
"""The notebook asks rank 0 for its names 0.2 s after a cell."""
WARM_CELLS = 30
"""More than the snapshots that a rank keeps: what depends on their number stays as it is then."""
NO_THREADS = dict.fromkeys(("MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
"""Otherwise libraries start as many as the machine has cores."""
WAITING = {"24", "202"}
"""System calls of x86-64 that wait for a lock: sched_yield, futex."""
ROLES = {"mux": "shell", "task": "shell", "broadcast": "shell"}
"""ipyparallel's names of channels for cells."""


def environment() -> dict[str, str]:
    """Return the versions that decide the counts."""
    return {"python": ".".join(platform.python_version_tuple()[:2])} | {name: version(name) for name in PACKAGES}


def fewest(windows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return by name the smallest value in a window; one that lacks the name has 0."""
    windows = list(windows)
    names = set[str]().union(*windows)
    found = {name: min(window.get(name, 0) for window in windows) for name in sorted(names)}
    return {name: number for name, number in found.items() if number}


class Cluster:
    """A cluster of two ranks that has just started and has run one collective, in a kernel of its own."""

    def __init__(self, kernel: Kernel, folder: Path) -> None:
        self.kernel, self._folder = kernel, folder
        self.footprint: Footprint = footprint(kernel)
        self.functions: dict[str, dict[str, float]] = {}
        """Calls in an empty cell, by process and function."""

    @cached_property
    def pids(self) -> dict[str, tuple[int, ...]]:
        """The processes by what they are; ipyparallel's controller has a child for heartbeats."""
        children = psutil.Process(self.footprint.controller).children(recursive=True)
        return {
            "notebook": (self.kernel.pid,),
            "controller": (self.footprint.controller, *(child.pid for child in children)),
            "agent": (self.footprint.agent,),
        } | {f"rank {rank}": (pid,) for rank, pid in self.footprint.pids.items()}

    def start_costs(self) -> Costs:
        """Measure what the processes hold right after the start. Call it first."""
        assert until(lambda: not any(psutil.Process(pid).children() for pid in self.footprint.ranks))  # self-tests
        loaded = self._modules()
        uss = [psutil.Process(pid).memory_full_info().uss / 2**20 for pid in self.footprint.ranks]
        modules = {name: len(names) for name, names in loaded.items()} | {
            "agent": int((self._folder / "agent").read_text())
        }
        return {"start.modules": modules, "start.own_memory_mib": {"rank": round(max(uss), 1)}} | self.held()

    def held(self) -> Costs:
        """Count threads and open files; not those that are there for a moment only."""
        threads, files = [], []
        for _ in range(10):
            found = {name: list(map(psutil.Process, pids)) for name, pids in self.pids.items()}
            threads.append({name: sum(one.num_threads() for one in each) for name, each in found.items()})
            files.append({name: sum(one.num_fds() for one in each) for name, each in found.items()})
            time.sleep(0.05)
        return {"start.threads": fewest(threads), "start.open_files": fewest(files)}

    def loaded(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return which of these modules the notebook and the ranks have imported."""
        names = set(names)
        return {process: sorted(names & loaded) for process, loaded in self._modules().items()}

    def _modules(self) -> dict[str, set[str]]:
        names = "__import__('json').dumps(sorted(__import__('sys').modules))"
        self._run(f"__import__('pathlib').Path({str(self._folder)!r}, 'modules-' + {{name}}).write_text({names})")
        return {name: set(found) - {"sitecustomize"} for name, found in self._read("modules").items()}

    def warm_up(self) -> None:
        """Run cells until they cost the same."""
        for _ in range(WARM_CELLS):
            self.kernel.ok(EMPTY)

    def system_calls(self, windows: int) -> Costs | None:
        """Count those of all processes by `perf`; None where it is missing or may not."""
        pids = {pid: name for name, pids in self.pids.items() for pid in pids}
        with _perf(pids) as recorded:
            if recorded is None:
                return None
            spans = self._run_windows(windows)
            lines = recorded()
        counts = {name: [Counter[str]() for _ in spans] for name in self.pids}
        for line in lines:  # "1234  715.632970060: NR 45 (2a, …"
            pid, at, _, number, *_ = line.split()
            window = _window_of(round(float(at.rstrip(":")) * 1e9), spans)
            if window is not None and number not in WAITING and (name := pids.get(int(pid))):
                counts[name][window][number] += 1
        return {"cell.system_calls": {name: sum(fewest(found).values()) for name, found in counts.items()}}

    def cell_costs(self, windows: int) -> Costs:
        """Count calls of Python functions in the notebook's kernel and on the ranks, and messages on sockets."""
        recorder = "__import__('tests.budgets.recorder', fromlist=['_'])"
        self._run(f"{recorder}.start()")
        self.kernel.ok(EMPTY)  # names of sockets
        spans = self._run_windows(windows)
        self._run(f"{recorder}.save({str(self._folder)!r} + '/calls-' + {{name}})")
        costs: Costs = {"cell.calls": {}, "cell.messages": {}, "cell.bytes": {}}
        for process, log in self._read("calls").items():
            calls = [Counter[str]() for _ in spans]
            for at, code in log["calls"]:
                if (window := _window_of(at, spans)) is not None:
                    calls[window][log["functions"][code]] += 1
            self.functions[process] = fewest(calls)
            costs["cell.calls"][process] = sum(self.functions[process].values())
            messages, sizes = ([Counter[str]() for _ in spans] for _ in range(2))
            for at, address, direction, number, size in log["messages"]:
                if (window := _window_of(at, spans)) is not None and (peer := self._peer(address)):
                    link = f"{process} to {peer}" if direction == "to" else f"{process} from {peer}"
                    messages[window][link] += number
                    sizes[window][link] += size
            costs["cell.messages"] |= fewest(messages)
            costs["cell.bytes"] |= fewest(sizes)
        return costs

    def _peer(self, address: str) -> str:
        """Name the other end of a socket; empty: another thread of the same process."""
        if not address or address.startswith("inproc:"):
            return ""
        if "/direct-" in address:
            return "direct socket"
        name, _, channel = address.rpartition("/")[2].replace("-", ":").rpartition(":")
        if not name:
            return channel.removesuffix(".s")
        return self._channels.get(f"{name}:{channel}", name)

    @cached_property
    def _channels(self) -> dict[str, str]:
        """By the end of the address, which channel of Jupyter or of the controller it is."""
        facts: dict[str, Any] = {**self.kernel.manager.get_connection_info()}
        prefix = Path(str(facts["ip"])).name
        found = {f"{prefix}:{facts[f'{name}_port']}": f"front end, {name}" for name in ("shell", "iopub", "control")}
        for path in (self.footprint.folder / "profile" / "security").glob("*.json"):
            facts = json.loads(path.read_text())
            prefix = facts["interface"].rpartition("/")[2]
            for name, number in facts.items():
                for one in number if isinstance(number, list) else [number]:
                    if isinstance(one, int):
                        found[f"{prefix}:{one}"] = f"controller, {ROLES.get(name, name)}"
        return found

    def _run_windows(self, number: int) -> list[tuple[int, int]]:
        spans = []
        for _ in range(number):
            begin = time.monotonic_ns()
            self.kernel.ok(EMPTY)
            end = begin + round(WINDOW_S * 1e9)
            time.sleep(max(0, end - time.monotonic_ns()) / 1e9)
            spans.append((begin, end))
        return spans

    def _run(self, expression: str) -> None:
        """Evaluate in the kernel and on the ranks, without a new name there; `{name}` is that of the process."""
        self.kernel.ok("%%distributed\n" + expression.replace("{name}", "f'rank {rank}'"))
        self.kernel.ok(expression.replace("{name}", "'notebook'"))

    def _read(self, kind: str) -> dict[str, Any]:
        files = sorted(self._folder.glob(f"{kind}-*"))
        return {file.name.partition("-")[2]: json.loads(file.read_text()) for file in files}


def _window_of(at: int, spans: Sequence[tuple[int, int]]) -> int | None:
    return next((index for index, (begin, end) in enumerate(spans) if begin <= at < end), None)


@contextlib.contextmanager
def _perf(pids: Iterable[int]) -> Iterator[Callable[[], list[str]] | None]:
    """Record system calls; yields what ends that and returns their lines; None: `perf` is missing or may not."""
    if shutil.which("perf") is None or platform.machine() != "x86_64":
        yield None
        return
    with tempfile.TemporaryDirectory() as name:
        folder, data = Path(name), f"{name}/data"
        for fifo in ("control", "ack"):
            os.mkfifo(folder / fifo)
        options = ["-q", "-e", "raw_syscalls:sys_enter", "-k", "CLOCK_MONOTONIC", "-D", "-1", "-o", data]
        options += [f"--control=fifo:{folder / 'control'},{folder / 'ack'}", "-p", ",".join(map(str, pids))]
        recording = subprocess.Popen(["perf", "record", *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        def lines() -> list[str]:
            recording.send_signal(signal.SIGINT)
            recording.wait()
            script = ["perf", "script", "-i", data, "--ns", "-F", "pid,time,trace"]
            return subprocess.run(script, capture_output=True, text=True, check=True).stdout.splitlines()

        try:
            yield lines if _enable(recording, folder) else None
        finally:
            recording.kill()
            recording.wait()


def _enable(recording: subprocess.Popen[bytes], folder: Path) -> bool:
    """Have `perf` begin; False if it has ended instead."""
    control, ack = (os.open(folder / name, os.O_RDWR | os.O_NONBLOCK) for name in ("control", "ack"))
    try:
        os.write(control, b"enable\n")
        until(lambda: recording.poll() is not None or select.select([ack], [], [], 0)[0])
        return recording.poll() is None
    finally:
        os.close(control)
        os.close(ack)


@contextlib.contextmanager
def open_cluster() -> Iterator[Cluster]:
    """Start a kernel and two ranks as on a machine where nothing is warm."""
    with tempfile.TemporaryDirectory(prefix="axb-") as name:
        folder = Path(name)
        path = os.pathsep.join(map(str, (Path(__file__).parent / "site", ROOT)))
        # Agents of other tests are forked from one that has imported more. Without a warm-up, ranks are forked as soon
        # as they can be, and not at some time while the agent imports what they may need later.
        env = {AGENT_SERVER.name: "", WARM_UP.name: "0", PYTHON_PATH.name: path, "AGENT_MODULES_FILE": f"{name}/agent"}
        with Kernel(cwd=folder, env=env | NO_THREADS) as kernel:
            kernel.ok(f"%load_ext axon_nb\n%distributed config threads=1\n%distributed start -n {RANKS}")
            kernel.ok("%%distributed\ndist.all_reduce(torch.ones(1))")
            yield Cluster(kernel, folder)
            kernel.ok("%distributed stop")
