"""An interrupt ends whatever ranks do, tears no optimizer's step, and leaves ranks at the same step, or says so."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kernel.recovery.step_parity import PLACE, are_together, begin_together, place_everywhere, step_differences
from tests.kernel.recovery.stop_button import LIMIT_S, STOPPED, check_next_cell
from tests.kernel.recovery.trained_model import SETUP
from tests.support.cases.pairwise import pairwise
from tests.support.kernel import Kernel, Reply
from tests.support.processes import until

OPTIMIZERS_OF_RANKS = """%%distributed
import os, subprocess
from torch.utils.data import DataLoader

class Slow(torch.optim.Optimizer):
    "A step that takes a while, in Python: an interrupt would tear it."
    def __init__(self, params, fail=False):
        super().__init__(params, {})
        self.fail = fail
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                time.sleep(0.002)
                p.add_(1)
        if self.fail:
            raise ValueError("a step that fails")

class Talking(Slow):
    "A step that communicates."
    def step(self, closure=None):
        super().step()
        if rank == 0:
            dist.barrier()

class Outer(torch.optim.Optimizer):
    "An optimizer that steps another one, twice."
    def __init__(self, params):
        params = list(params)
        super().__init__(params, {})
        self.inner = Slow(params)
    def step(self, closure=None):
        self.inner.step()
        self.inner.step()

def many(count=20):
    return [nn.Parameter(torch.zeros(1)) for _ in range(count)]
"""


@pytest.fixture(scope="module")
def trained() -> Iterator[Kernel]:
    """A kernel whose 4 ranks have DDP, FSDP2 and subgroups that are in use."""
    with Kernel() as kernel:
        kernel.ok("%load_ext axon_nb\n%distributed start -n 4 --devices cpu")
        kernel.ok(SETUP)
        kernel.ok(OPTIMIZERS_OF_RANKS)
        kernel.ok(PLACE)
        yield kernel


def interrupted(kernel: Kernel, code: str, *, after_s: float = 0.3, times: int = 1, every_s: float = 0.02) -> Reply:
    """Run an endless cell, and interrupt it when it has begun."""
    request = kernel.submit(f"%%distributed\nprint('go', flush=True)\n{code}")
    kernel.wait_for_output(request, "go", ranks=range(4))
    time.sleep(after_s)  # into the middle of it
    for _ in range(times):
        kernel.interrupt()
        time.sleep(every_s)
    reply = kernel.collect(request, timeout=LIMIT_S)
    kernel.settle()  # an interrupt just before a cell is sent may be noticed just after
    return reply


def reported_ranks(reply: Reply) -> set[int]:
    """The ranks of which the report says what they did."""
    ranks: set[int] = set()
    for spec in re.findall(r"^\[ranks? ([\d,-]+)\] (?:waited in|(?:was|were) interrupted)", reply.traceback, re.M):
        for part in spec.split(","):
            first, _, last = part.partition("-")
            ranks |= set(range(int(first), int(last or first) + 1))
    return ranks


ANYTHING = {
    "a Python loop": "while True: pass",
    "time.sleep": "time.sleep(600)",
    "a stuck collective": "if rank: dist.barrier()\nelse: time.sleep(600)",
    "a backward": (
        "x = torch.randn(256, 256, requires_grad=True)\nwhile True:\n    y = x\n"
        "    for _ in range(40): y = torch.tanh(y @ x)\n    y.sum().backward()"
    ),
    "a backward that waits": "if rank == 3: time.sleep(600)\nwhile True: step()",
    "a DataLoader loop": (
        "while True:\n    for batch in DataLoader(torch.arange(64.0), batch_size=4, num_workers=2): batch.sum()"
    ),
    "a loop of forks": "while True:\n    pid = os.fork() or os._exit(0)\n    _ = os.waitpid(pid, 0)",
    "await": "import asyncio\nawait asyncio.sleep(600)",
    "await in a loop": "import asyncio\nwhile True:\n    await asyncio.sleep(0.01)",
    "subprocess.run": "subprocess.run(['sleep', '600'])",
    "a shell command": "!sleep 600\ntime.sleep(600)",
    "the output of a shell command": "lines = !sleep 600",
    "send and recv": "while True:\n    (dist.recv if rank % 2 else dist.send)(torch.ones(9), rank ^ 1)",
    "a context manager that waits": (
        "import contextlib\n@contextlib.contextmanager\ndef late():\n    try: yield\n    finally: time.sleep(0.3)\n"
        "with late(): time.sleep(600)"
    ),
}

STARTING_LOADER = "_MultiProcessingDataLoaderIter.__del__"
"""Fails when its loader was interrupted while it started workers: torch 2.13 sets what it reads after that."""


@pytest.mark.parametrize("what", ANYTHING)
def test_interrupt_aborts_any_cell(trained: Kernel, what: str) -> None:
    reply = interrupted(trained, ANYTHING[what])
    assert reply.ename == "CellInterrupt", reply.traceback
    assert reported_ranks(reply) == {0, 1, 2, 3}, reply.traceback
    ignored = [line for line in reply.stderr.splitlines() if "Exception ignored" in line]
    assert [line for line in ignored if STARTING_LOADER not in line] == []
    assert check_next_cell(trained) == ""


FORMS = {
    "except Exception": "while True:\n    try: {}\n    except Exception: pass",
    "bare except": "while True:\n    try: {}\n    except: pass",
    "except BaseException, five times": (
        "for _ in range(5):\n    try:\n        while True: {}\n    except BaseException: pass"
    ),
    "suppress(BaseException)": (
        "import contextlib\nfor _ in range(4):\n    with contextlib.suppress(BaseException):\n        while True: {}"
    ),
}
STEPS = {"a step": "step()", "a barrier": "dist.barrier()", "no communication": "time.sleep(0.01)"}


@pytest.mark.parametrize(
    ("end", "what", "form"), pairwise(["an interrupt", "another rank raises"], list(STEPS), list(FORMS))
)
def test_code_that_swallows_interrupts_is_aborted(trained: Kernel, end: str, what: str, form: str) -> None:
    code = FORMS[form].format(STEPS[what])
    if end == "an interrupt":
        endless = form == "bare except"  # swallows for ever, and ends only between its own lines
        reply = interrupted(trained, code.replace("except: pass", "except: seen = None") if endless else code)
        assert reply.ename == "CellInterrupt", reply.traceback
    else:
        reply = trained.run(f"%%distributed\nif rank == 1: raise ValueError('bug')\n{code}", timeout=LIMIT_S)
        assert reply.traceback.startswith("[rank 1]"), reply.traceback
        assert "ValueError: bug" in reply.traceback
    assert check_next_cell(trained) == ""


def test_interrupts_during_rebuild_are_ignored(trained: Kernel) -> None:
    """When they come does not matter: tests/unit/cluster/test_rebuild.py."""
    begin_together(trained)
    reply = interrupted(trained, "while True: step()", times=8, every_s=0.03)
    assert reply.ename in STOPPED, reply.traceback
    assert check_next_cell(trained) == ""
    begin_together(trained, reply)
    assert "[ranks 0-3] True" in trained.ok("%%distributed\nstep()\nlen(weights()) == 2").lines()


def test_interrupt_while_a_failed_cell_ends_is_ignored(trained: Kernel) -> None:
    """When they come does not matter: tests/unit/cluster/test_cells.py."""
    request = trained.submit("%%distributed\nprint('go', flush=True)\nif rank == 2: 1 / 0\ndist.barrier()")
    trained.wait_for_output(request, "go")
    for _ in range(2):
        time.sleep(0.07)
        trained.interrupt()
    reply = trained.collect(request, timeout=LIMIT_S)
    trained.settle()  # an interrupt just before a cell is sent may be noticed just after
    assert reply.ename in (*STOPPED, "CellError"), reply.traceback
    assert check_next_cell(trained) == ""


OPTIMIZERS = {
    "a slow step": ("Slow(params)", "opt.step()"),
    "a step in a step": ("Outer(params)", "opt.step()"),
    "with a scheduler": (
        "Slow(params)\nscheduler = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD(params, 0.1), lambda _: 1)",
        "opt.step()",
    ),
    "a step that fails": ("Slow(params, fail=True)", "\n    try: opt.step()\n    except ValueError: pass"),
}


@pytest.mark.parametrize("what", OPTIMIZERS)
def test_optimizer_step_is_atomic(trained: Kernel, what: str) -> None:
    make, step = OPTIMIZERS[what]
    for round_number in range(3):
        code = f"params = many()\nopt = {make}\nwhile True: {step}"
        reply = interrupted(trained, code, after_s=0.2 + 0.03 * round_number, times=1 + round_number % 2)
        assert reply.ename in STOPPED, reply.traceback
        ranks = trained.ok("%%distributed --out values\nsorted({int(p) for p in params})")
        assert all(len(seen) == 1 for seen in trained.value("values.values").values()), ranks.stdout


def test_step_stuck_in_a_collective_is_aborted(trained: Kernel) -> None:
    reply = interrupted(trained, "opt = Talking(many(2))\nwhile True: opt.step()")
    assert reply.ename == "CellInterrupt"
    assert "[rank 0] waited in barrier" in reply.traceback
    assert check_next_cell(trained) == ""


def test_step_with_endless_closure_is_aborted(trained: Kernel) -> None:
    code = "def closure():\n    while True: time.sleep(0.01)\ntorch.optim.LBFGS(many(1)).step(closure)"
    reply = interrupted(trained, code)
    assert reply.ename == "CellInterrupt", reply.traceback
    assert reported_ranks(reply) == {0, 1, 2, 3}
    assert check_next_cell(trained) == ""


PROGRAMS = {
    "DDP and FSDP2": "while True: step()",
    "FSDP2 on its mesh alone": (
        "while True:\n    sharded_optimizer.zero_grad()\n    sharded(torch.ones(8, 32)).square().mean().backward()\n"
        "    sharded_optimizer.step()"
    ),
}


@pytest.mark.parametrize("what", PROGRAMS)
def test_ranks_are_at_the_same_step_or_the_difference_is_reported(trained: Kernel, what: str) -> None:
    _interrupt_training(trained, PROGRAMS[what], rounds=6)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ranks_are_at_the_same_step_after_100_interrupts(trained: Kernel) -> None:
    together = _interrupt_training(trained, PROGRAMS["DDP and FSDP2"], rounds=100)
    assert together >= 80, "the others were reported as a step apart"


def _interrupt_training(kernel: Kernel, code: str, *, rounds: int) -> int:
    """Interrupt training; how many interrupts left all ranks at the same step."""
    rng = random.Random(7)
    together = 0
    begin_together(kernel)
    for _ in range(rounds):
        reply = interrupted(kernel, code, after_s=rng.uniform(0, 0.6))
        assert reply.ename == "CellInterrupt", reply.traceback
        places = place_everywhere(kernel)
        reported = step_differences(reply)
        assert are_together(places) or reported, (places, reply.stdout)
        together += not reported
        begin_together(kernel, reply)
    return together


def test_recovery_leaves_two_threads_per_group(trained: Kernel) -> None:
    look = (
        "%%distributed --out held\nimport os, threading\nfrom axon_nb.engine.groups.state import current_groups\n"
        "count = len(current_groups().gloo.abandoned)\n"
        "(len(os.listdir('/proc/self/task')), count, threading.active_count(), len(os.listdir('/proc/self/fd')))"
    )
    trained.run("%%distributed\nif rank == 1: 1 / 0\nstep()")
    trained.ok(look)
    before = trained.value("held.values")
    for _ in range(8):
        trained.run("%%distributed\nif rank == 1: 1 / 0\nstep()")
    seen: dict[int, Any] = {}

    def nothing_else() -> bool:
        trained.ok(look)
        seen.update(trained.value("held.values"))
        return all(
            threads - before[rank][0] <= 2 * (groups - before[rank][1]) + 8
            and python_threads - before[rank][2] <= 8
            and fds - before[rank][3] <= 8
            for rank, (threads, groups, python_threads, fds) in seen.items()
        )

    assert until(nothing_else), (before, seen)
