"""Collectives of a group run in the order in which they were begun, whichever thread runs them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from axon_nb.comm.shared_memory import order as module
from axon_nb.comm.shared_memory.order import Order
from axon_nb.comm.shared_memory.work import SharedWork


@pytest.fixture(autouse=True)
def interrupted_helper() -> Iterator[None]:
    """New threads lose the processor at random lines of the module, as on a busy machine."""
    choice = random.Random(1)

    def line(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != module.__file__:
            return None
        if event == "line" and choice.random() < 0.1:
            time.sleep(0.001)
        return line

    threading.settrace(line)
    yield
    threading.settrace(None)


def test_no_collective_overtakes_another() -> None:
    order = Order("test-order", lambda error: None, lambda: False)
    choice, ran, begun = random.Random(1), list[int](), list[SharedWork]()
    for number in range(1000):

        def job(number: int = number) -> None:
            ran.append(number)

        work = SharedWork([])
        if choice.random() < 0.1 and order.run_now(job):
            work.finish()
        else:
            order.put(job, work, in_wait=True)
        begun.append(work)
        time.sleep(choice.random() * 0.001)
        if choice.random() < 0.5:
            work.wait()
    for work in begun:
        work.wait()
    assert ran == list(range(1000))
    order.close()
