"""The simulator process: crashes, cancellation and interrupts."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import pytest
from torch import nn

from axon_nb import plan
from axon_nb.parallel.models import GPTConfig
from axon_nb.plan.models import TensorSpec

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
def test_a_simulator_crash_is_reported(model: Any, text: str) -> None:
    with pytest.raises(plan.SimulatorError, match=text):
        plan.memory(model, 2, inputs=TensorSpec((1, 2)))


def test_a_plan_can_be_cancelled() -> None:
    cancel = threading.Event()
    with pytest.raises(plan.PlanCancelledError):
        plan.memory(SMALL, 8, progress=lambda *_: cancel.set(), cancel=cancel, refresh=True)


def test_an_interrupt_ends_the_simulator() -> None:
    def interrupted(share: float, text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plan.memory(SMALL, 8, progress=interrupted, refresh=True)
