"""Conditions that a test waits for in a running cell: what ranks wait in, a noticed interrupt, C code."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil

from tests.support.kernel import Kernel
from tests.support.processes import until

_TOUCH = """
import axon_nb
import os.path as t_path
t_current = axon_nb.current_cluster()
def t_touch_when(condition, path):
    import pathlib, threading, time
    def look():
        while not condition():
            time.sleep(0.02)
        pathlib.Path(path).touch()
    threading.Thread(target=look, daemon=True).start()
"""
MEET = """
def t_meet(path):
    import pathlib, time
    pathlib.Path(path + ".begun").touch()
    while not pathlib.Path(path).exists():
        time.sleep(0.01)
"""
"""Part of a cell: `t_meet(path)` on a rank waits, outside of all communication, for the moment of `meet_when`."""
INTERRUPTED = "any(run.interrupted_at is not None for run in t_current.state.active_cells)"
"""The notebook has noticed an interrupt of a running cell."""


def waiting(call: str, *ranks: int) -> str:
    """These ranks wait in this call, and have done so for a moment."""
    seen = f"t_current.sample({ranks!r}).values()"
    return f"sum(state.call == {call!r} and state.activity.name == 'WAITING' for state in {seen}) == {len(ranks)}"


def touch_when(kernel: Kernel, condition: str, path: Path) -> None:
    """From now on the notebook looks for this, beside what it runs, and makes the file at `path` when it has come.

    Args:
        kernel: Of the notebook.
        condition: `INTERRUPTED`, or what `waiting` gives.
        path: Where there is no file yet.
    """
    kernel.ok(f"{_TOUCH}t_touch_when(lambda: {condition}, {str(path)!r})")


def meet_when(kernel: Kernel, condition: str, path: Path) -> None:
    """As `touch_when`, from the moment that a rank has come to its `t_meet(path)`."""
    touch_when(kernel, f"t_path.exists({f'{path}.begun'!r}) and {condition}", path)


def spins(pid: int, *, seconds: float = 0.5) -> bool:
    """Wait until a process has computed for so long from now on; whether it has."""
    process = psutil.Process(pid)

    def used() -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    before = used()
    return until(lambda: used() - before > seconds, timeout=120)


def sleeps_masked(pid: int, *, seconds: float = 0.5) -> bool:
    """Wait until the main thread of a process has slept for some time with SIGINT masked; whether it came to that."""
    status, asleep = Path(f"/proc/{pid}/task/{pid}/status"), 0

    def has_slept() -> bool:
        nonlocal asleep
        facts = dict(line.split(":\t", 1) for line in status.read_text().splitlines())
        masked = int(facts["SigBlk"], 16) >> (signal.SIGINT - 1) & 1
        asleep = asleep + 1 if masked and facts["State"].startswith("S") else 0
        return asleep * 0.02 >= seconds

    return until(has_slept, timeout=100)
