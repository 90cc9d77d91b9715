"""The simulator process: crashes, cancellation and interrupts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from axon_nb import plan
from axon_nb.parallel.models import GPTConfig
from axon_nb.plan.models import TensorSpec
from tests.support.processes import until

pytestmark = pytest.mark.timeout(900)
SMALL = GPTConfig(vocab=64, context=16, hidden=32, heads=2, blocks=2)


def _kills_itself() -> nn.Module:
    sys.stderr.write("a last word\n")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)
    return nn.Linear(2, 2)


def _exits() -> nn.Module:
    os._exit(3)


@pytest.mark.parametrize(
    ("model", "text"),
    [(_kills_itself, "was killed by SIGKILL(?s:.*)a last word"), (_exits, "exited with code 3")],
)
def test_simulator_crash_is_reported(model: Any, text: str) -> None:
    with pytest.raises(plan.SimulatorError, match=text):
        plan.memory(model, 2, inputs=TensorSpec((1, 2)))


def test_plan_can_be_cancelled() -> None:
    cancel = threading.Event()
    with pytest.raises(plan.PlanCancelledError):
        plan.memory(SMALL, 8, progress=lambda *_: cancel.set(), cancel=cancel, refresh=True)


def test_interrupt_ends_the_simulator() -> None:
    def interrupted(share: float, text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plan.memory(SMALL, 8, progress=interrupted, refresh=True)


def _says_its_pid(folder: str) -> nn.Module:
    path = Path(folder) / str(os.getpid())
    path.touch()
    time.sleep(600)
    return nn.Linear(2, 2)


def _is_gone(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return not status.exists() or "zombie" in status.read_text()


_ASKS = """
import sys
from functools import partial
from axon_nb import plan
from tests.plan.test_worker import _says_its_pid
plan.memory(partial(_says_its_pid, sys.argv[1]), 2, inputs=plan.TensorSpec((1, 2)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals the children of a killed process")
def test_simulator_ends_with_its_parent_process(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", _ASKS, str(tmp_path)]) as asking:
        try:
            assert until(lambda: any(tmp_path.iterdir()), timeout=300)
            simulators = [int(path.name) for path in tmp_path.iterdir()]
        finally:
            asking.kill()
    for pid in simulators:
        assert until(partial(_is_gone, pid))


def _is_large() -> nn.Module:
    large = bytearray(64 * 1024**3)  # more than the limit on any machine
    return nn.Linear(len(large) % 2 + 2, 2)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux bounds a process's memory")
def test_simulator_memory_is_bounded() -> None:
    with pytest.raises(plan.PlanError, match="GiB of memory: make the model and its inputs without data"):
        plan.memory(_is_large, 2, inputs=TensorSpec((1, 2)))
