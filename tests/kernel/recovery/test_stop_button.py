"""No interrupt is lost: while a cell is read, parsed, sent or started, nor the second one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from tests.kernel.recovery.stop_button import STOPPED, check_next_cell, interrupt_at_random
from tests.support.kernel import Kernel

CELLS = [
    "%%distributed\nwhile True: pass",
    "%%distributed\nimport time\nwhile True: time.sleep(0.001)",
    "%%distributed\nimport asyncio\nwhile True: await asyncio.sleep(0.001)",
    "%%distributed\nwhile True: dist.all_reduce(torch.ones(8))",
    "%%distributed\nif rank == 0: dist.barrier()\nwhile True: x = 1",
    "%%distributed --quiet\nwhile True: print('x' * 20)",
    "%%distributed --out kept\nwhile True: pass",
    "%%rank 1\nwhile True: pass",
    "import time\n" + "x = 1\n" * 200 + "get_ipython().run_cell_magic('distributed', '', 'while True: pass')",
    "import axon_nb\naxon_nb.current_cluster().run('while True: pass', quiet=True)",
    "while True: pass",
    "import asyncio\nwhile True: await asyncio.sleep(0.001)",
]
"""Cells that do not end: on ranks, awaited and not, and in the notebook itself."""


CANCELS = {
    "wait_for": "try: await asyncio.wait_for(endless(), 0.2)\nexcept TimeoutError: print('over')",
    "timeout": "try:\n    async with asyncio.timeout(0.2): await endless()\nexcept TimeoutError: print('over')",
    "a task": (
        "task = asyncio.create_task(endless())\nawait asyncio.sleep(0.2)\ntask.cancel()\n"
        "try: await task\nexcept asyncio.CancelledError as error: print(*error.__notes__, 'over', task.cancelled())"
    ),
    "TaskGroup": (
        "async def fail():\n    await asyncio.sleep(0.2)\n    raise ValueError\n"
        "try:\n    async with asyncio.TaskGroup() as group:\n        group.create_task(endless())\n"
        "        group.create_task(fail())\nexcept* ValueError: print('over')"
    ),
    "anyio": "import anyio\nwith anyio.move_on_after(0.2): await endless()\nprint('over')",
}
"""Ways to cancel a cell that a program awaits."""


@pytest.fixture(scope="module")
def pair() -> Iterator[Kernel]:
    """A kernel with 2 ranks."""
    with Kernel() as kernel:
        kernel.ok("%load_ext axon_nb\n%distributed start -n 2 --devices cpu")
        yield kernel


def test_kernel_has_the_hooks(pair: Kernel) -> None:
    assert pair.value("get_ipython().kernel.pre_handler_hook.__module__") == "axon_nb.cluster.cells.kernel_interrupts"


def test_each_of_20_interrupts_aborts_its_cell(pair: Kernel) -> None:
    assert interrupt_at_random(pair, CELLS, seed=1, rounds=20, within_s=0.1) == []


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_each_of_200_interrupts_aborts_its_cell(pair: Kernel) -> None:
    assert interrupt_at_random(pair, CELLS, seed=2, rounds=200, within_s=0.1) == []


def test_interrupt_before_the_cell_starts_aborts_it(pair: Kernel) -> None:
    """A cell that waits to be read: the kernel is stopped meanwhile, so that the interrupt is noticed first."""
    for _ in range(3):
        os.kill(pair.pid, signal.SIGSTOP)
        request = pair.submit("%%distributed\nwhile True: pass")
        pair.interrupt()
        os.kill(pair.pid, signal.SIGCONT)
        assert pair.collect(request).ename in STOPPED
        assert check_next_cell(pair) == ""


def test_interrupt_of_an_idle_kernel_spares_the_next_cell(pair: Kernel) -> None:
    for _ in range(3):
        pair.interrupt()
        pair.settle()
        pair.ok("x = 1")
        pair.interrupt()
        pair.settle()
        assert pair.ok("%%distributed\n'fine'").lines() == ["[ranks 0-1] 'fine'"]


def test_cells_queued_behind_an_interrupted_one_do_not_run(pair: Kernel) -> None:
    first = pair.submit("%%distributed\nprint('go', flush=True)\nwhile True: pass")
    second = pair.submit("ran = True")
    pair.wait_for_output(first, "go")
    pair.interrupt()
    assert pair.collect(first).ename in STOPPED
    answer = pair.client.get_shell_msg(timeout=120)
    while answer["parent_header"]["msg_id"] != second:
        answer = pair.client.get_shell_msg(timeout=120)
    assert answer["content"]["status"] == "aborted"
    assert pair.value("'ran' in globals()") is False
    assert check_next_cell(pair) == ""


def test_interrupt_during_another_request_keeps_the_kernel_responsive(pair: Kernel) -> None:
    for _ in range(5):
        pair.client.complete("imp", 3)
        pair.interrupt()
    assert pair.run("1 + 1").status  # which the last interrupt may have been meant for
    assert pair.value("1 + 1") == 2


def test_cancelled_cell_stops_its_ranks_and_keeps_the_kernel(pair: Kernel) -> None:
    pair.ok("import asyncio, axon_nb\ndef endless(): return axon_nb.current_cluster().run_async('while True: pass')")
    for way, code in CANCELS.items():
        reply = pair.ok(code)
        assert "over" in reply.stdout, way
        assert ("The cell was interrupted. Ranks 0-1 stopped. over True" in reply.stdout) == (way == "a task")
        assert check_next_cell(pair) == "", way


def test_interrupt_ends_cells_in_tasks_and_keeps_the_kernel(pair: Kernel) -> None:
    cell = "print('go', flush=True)\nwhile True: pass"
    cells = f"[axon_nb.current_cluster().run_async({cell!r}, ranks=[rank]) for rank in (0, 1)]"
    request = pair.submit(f"import asyncio, axon_nb\nawait asyncio.gather(*{cells})")
    pair.wait_for_output(request, "go", ranks=[0, 1])
    pair.interrupt()
    assert pair.collect(request).ename == "CancelledError"
    assert check_next_cell(pair) == ""


def test_error_of_a_signal_handler_ends_an_awaited_cell(pair: Kernel) -> None:
    """As of `signal.alarm` or pytest-timeout: in the event loop it would end the kernel."""
    pair.ok("import asyncio, axon_nb, signal\ndef limit(*_): raise LookupError('limit')")
    pair.ok("def alarm(): signal.setitimer(signal.ITIMER_REAL, 0.3)\nbefore = signal.signal(signal.SIGALRM, limit)")
    endless = "axon_nb.current_cluster().run_async('while True: pass')"
    for cell in (
        "alarm()\nget_ipython().run_cell_magic('distributed', '', 'while True: pass')",
        f"alarm()\nawait {endless}",
        f"alarm()\nawait asyncio.wait_for({endless}, 60)",
    ):
        reply = pair.run(cell)
        assert (reply.ename, reply.evalue) == ("LookupError", "limit"), cell
        assert check_next_cell(pair) == "", cell
    pair.ok("alarm()")
    assert pair.run("%%distributed\nwhile True: pass").ename == "LookupError"
    assert check_next_cell(pair) == ""
    pair.ok("import sys\n_ = signal.signal(signal.SIGALRM, lambda *_: sys.exit(3))")
    assert pair.run(f"alarm()\nawait asyncio.wait_for({endless}, 60)").ename == "CancelledError"
    assert check_next_cell(pair) == ""
    assert pair.value("signal.signal(signal.SIGALRM, before).__name__") == "<lambda>"


@pytest.fixture
def submit(pair: Kernel) -> Iterator[Callable[[str], str]]:
    """Sends a cell to a subshell of the kernel; returns the request's id."""
    channel = pair.client.session
    pair.client.control_channel.send(channel.msg("create_subshell_request"))
    subshell = pair.client.get_control_msg(timeout=100)["content"]["subshell_id"]

    def send(code: str) -> str:
        message = channel.msg("execute_request", {"code": code, "silent": False, "store_history": True})
        message["header"]["subshell_id"] = subshell
        pair.client.shell_channel.send(message)
        return str(message["header"]["msg_id"])

    yield send
    pair.client.control_channel.send(channel.msg("delete_subshell_request", {"subshell_id": subshell}))
    assert pair.client.get_control_msg(timeout=100)["content"]["status"] == "ok"


def test_semicolon_on_a_subshell_hides_no_value_of_ranks(pair: Kernel, submit: Callable[[str], str]) -> None:
    """IPython looks at the newest cell of all shells, and hides what a cell of the notebook gives."""
    slow = pair.submit("%%distributed\nimport time\nprint('go', flush=True)\ntime.sleep(1)\n'the value'")
    pair.wait_for_output(slow, "go", ranks=[0, 1])
    quick = submit("x = 1;")
    pair.wait_for_output(slow, "'the value'")
    reply = pair.collect(slow)
    assert "[ranks 0-1] 'the value'" in reply.lines()
    assert quick


def test_interrupts_do_not_stop_cells_of_subshells(pair: Kernel, submit: Callable[[str], str]) -> None:
    """An interrupt of the idle kernel is none of theirs; the panel and `cancel` stop those on ranks."""
    pair.interrupt()
    pair.settle()
    assert pair.collect(submit("print('fine')")).stdout == "fine\n"
    request = submit("%%distributed\nprint('go', flush=True)\nwhile True: pass")
    pair.wait_for_output(request, "go", ranks=[0, 1])
    assert pair.ok("%distributed cancel").stdout == "Interrupted the cell on ranks 0-1.\n"
    reply = pair.collect(request)
    assert reply.ename == "CellInterrupt"
    assert "the stop button does not reach" in reply.stdout
    assert "stop button" not in pair.collect(submit("%%distributed\n1")).stdout


def test_unload_restores_the_stop_button() -> None:
    with Kernel() as kernel:
        kernel.ok("%load_ext axon_nb")
        kernel.ok("%unload_ext axon_nb")
        kernel.ok("import signal")
        assert kernel.value("signal.getsignal(signal.SIGINT).__name__") == "default_int_handler"
        assert kernel.value("'pre_handler_hook' in vars(get_ipython().kernel)") is False


def test_interrupt_shows_only_user_lines(pair: Kernel) -> None:
    request = pair.submit("def wait():\n    while True: pass\nprint('go', flush=True)\nwait()")
    pair.wait_for_output(request, "go")
    pair.interrupt()
    shown = pair.collect(request)
    assert shown.ename == "KeyboardInterrupt"
    assert "while True: pass" in shown.traceback
    assert "stop_button" not in shown.traceback
