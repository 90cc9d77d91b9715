"""Interrupts at any moment of a cell: each ends it, none is lost, none harms the next cell."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from axon_nb.engine.kernel.interrupts import InterruptHandler
from tests.support.cell_output import by_rank
from tests.support.kernel import Kernel

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
ROUNDS = [3, pytest.param(20, marks=pytest.mark.slow)]


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("what", CELLS)
def test_interrupt_at_any_time_aborts_the_cell(own_kernel: Kernel, what: str, rounds: int) -> None:
    chance = random.Random(what)
    lost = []
    for number in range(rounds):
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


@pytest.fixture
def handlers() -> Iterator[None]:
    """Puts back the handlers that `InterruptHandler` replaces."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGRTMAX)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_interrupt_of_finished_cell_spares_the_next_one() -> None:
    interrupts = InterruptHandler(None, lambda frame: False)
    interrupts.begin_cell("first")
    interrupts.end_cell()
    interrupts.begin_cell("second")
    assert not interrupts.interrupt("first")
    assert interrupts.pending == 0
    assert interrupts.interrupt("second")
    assert interrupts.interrupt()
    interrupts.end_cell()


async def _run_what_is_due() -> None:
    """Run the callbacks that the signal has left, and a task that they cancel to its end.

    Python calls the handler of a signal that is pending before `pthread_sigmask` returns.
    """
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("has_ended", [False, True])
def test_late_signal_spares_the_next_cell(has_ended: bool) -> None:
    loop = asyncio.new_event_loop()
    interrupts = InterruptHandler(SimpleNamespace(io_loop=SimpleNamespace(asyncio_loop=loop)), lambda frame: False)
    interrupts.begin_cell("first")
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        assert interrupts.interrupt("first")
        if has_ended:
            interrupts.end_cell()
            interrupts.begin_cell("second")
        task = loop.create_task(asyncio.sleep(60))
        with interrupts.track_task(task):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            loop.run_until_complete(_run_what_is_due())
        assert task.cancelled() != has_ended
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        interrupts.end_cell()
        task.cancel()
        loop.run_until_complete(asyncio.wait([task]))
        loop.close()
