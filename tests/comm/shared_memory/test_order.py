"""Threads and ranks that lose the processor at any line: collectives stay in order, calls are read whole or not."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from axon_nb.comm.shared_memory import work as order_module
from axon_nb.comm.shared_memory.segment import pages as pages_module
from axon_nb.comm.shared_memory.segment.memory import Layout, SharedMemory
from axon_nb.comm.shared_memory.segment.progress import Progress
from axon_nb.comm.shared_memory.work import Order, SharedWork

_MODULES = (order_module.__file__, pages_module.__file__)


@pytest.fixture(autouse=True)
def slow_threads() -> Iterator[None]:
    """New threads lose the processor at random lines of the two modules, as on a busy machine."""
    choice = random.Random(1)

    def line(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in _MODULES:
            return None
        if event == "line" and choice.random() < 0.1:
            time.sleep(0.001)
        return line

    threading.settrace(line)
    yield
    threading.settrace(None)


def test_call_is_never_mistaken_for_an_earlier_one() -> None:
    layout = Layout.of(2, 1 << 20)
    descriptor = SharedMemory.create(layout)
    ranks = [Progress(SharedMemory(descriptor, layout), rank, [0, 1], None) for rank in range(2)]
    os.close(descriptor)
    seen, current, wrong = set[int](), [1], list[tuple[int, int]]()

    def look() -> None:
        while (sequence := current[0]) < 3000:
            fact, line = ranks[1].call_of(0, sequence)
            if (fact, line) == (0, 0):
                continue
            seen.add(sequence)
            if (fact, line) != (sequence, sequence):
                wrong.append((sequence, fact))

    thread = threading.Thread(target=look)
    thread.start()
    for sequence in range(1, 3001):
        current[0] = sequence
        time.sleep(0.0002)
        ranks[0].announce(sequence, sequence, sequence)
        time.sleep(0.0002)
    thread.join()
    assert not wrong
    assert len(seen) > 100


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
