"""Interrupts at any moment of a cell: each ends it, none is lost, none harms the next cell."""

from __future__ import annotations

import random
import signal
import time

import pytest

from axon_nb.engine.kernel.interrupts import InterruptHandler
from tests.support.kernel import Kernel
from tests.support.output_lines import by_rank

LIMIT = 60.0
"""Seconds within which an interrupted cell must be over."""

CELLS = {
    "plain Python": "while True:\n    x = sum(i * i for i in range(200))",
    "printing": "while True:\n    print('x' * 20)",
    "tensors": "t = torch.ones(50, 50)\nwhile True:\n    t = (t @ t).clamp(max=1)",
    "sleeping": "import time\nwhile True:\n    time.sleep(0.01)",
    "waiting for the other rank": "if rank == 0:\n    dist.barrier()\nwhile True:\n    x = 1",
    "awaiting": "import asyncio\nwhile True:\n    await asyncio.sleep(0.001)",
}
ROUNDS = 10


@pytest.mark.parametrize("what", CELLS)
def test_an_interrupt_at_any_moment_ends_the_cell(own_kernel: Kernel, what: str) -> None:
    chance = random.Random(what)
    lost = []
    for number in range(ROUNDS):
        delay = chance.uniform(0.0, 0.2)
        request = own_kernel.submit(f"%%distributed\n{CELLS[what]}")
        _wait_until_the_kernel_has_it(own_kernel, request)
        time.sleep(delay)  # the moment of the interrupt is what is tested
        own_kernel.interrupt()
        try:
            reply = own_kernel.collect(request, timeout=LIMIT)
        except TimeoutError:
            lost.append(f"round {number}: not over {LIMIT} s after an interrupt at {delay * 1000:.0f} ms")
            own_kernel.interrupt()
            reply = own_kernel.collect(request)
        assert reply.ename in ("CellInterrupt", "KeyboardInterrupt", "CancelledError"), (delay, reply.traceback)
        assert "still busy" not in reply.traceback + reply.stdout
        after = own_kernel.run("%%distributed\nrank", timeout=120)
        assert after.ok, f"after an interrupt at {delay * 1000:.0f} ms: {after.traceback}"
        assert by_rank(after.stdout) == {0: ["0"], 1: ["1"]}
    assert lost == []


def _wait_until_the_kernel_has_it(kernel: Kernel, request: str) -> None:
    """An idle kernel drops interrupts, as it should: the earliest that counts comes after the cell has begun."""
    end = time.monotonic() + 90
    while time.monotonic() < end:
        message = kernel.client.get_iopub_msg(timeout=90)
        if message["msg_type"] == "execute_input" and message["parent_header"].get("msg_id") == request:
            return
    raise TimeoutError("the kernel has not begun the cell")


def test_an_interrupt_of_a_cell_that_has_ended_spares_the_next_one() -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGRTMAX)}
    interrupts = InterruptHandler(None, lambda frame: False)
    try:
        interrupts.begin_cell("first")
        interrupts.end_cell()
        interrupts.begin_cell("second")
        assert not interrupts.interrupt("first")
        assert interrupts.pending == 0
        assert interrupts.interrupt("second")
        assert interrupts.interrupt()
    finally:
        interrupts.end_cell()
        for number, handler in handlers.items():
            signal.signal(number, handler)
