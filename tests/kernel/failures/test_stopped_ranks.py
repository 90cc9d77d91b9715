"""A rank that is stopped cannot answer: the others read from shared memory in which call it is."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kernel import Kernel
from tests.support.processes import footprint

STOP = "os.kill(os.getpid(), signal.SIGSTOP)"
CASES = {
    "outside of a call": (
        f"dist.barrier()\nif rank == 1: {STOP}\ndist.all_reduce(torch.ones(1))",
        "(stopped; its last call was barrier): ranks 0,2 have been in all_reduce at line 5 for",
    ),
    "before a message": (
        f"if rank == 1:\n    {STOP}\n    dist.send(torch.ones(1), 0)\nif rank == 0: dist.recv(torch.ones(1), 1)",
        "rank 0 has been in recv at line 6 for",
    ),
}


@pytest.fixture(scope="module")
def three() -> Iterator[Kernel]:
    """A kernel with 3 ranks over shared memory."""
    with Kernel(env={"AXON_NB_CPU_BACKEND": "shm"}) as kernel:
        kernel.ok("%load_ext axon_nb\n%distributed start -n 3")
        yield kernel


@pytest.mark.parametrize("where", CASES)
def test_suspended_rank_is_named_while_awaited(three: Kernel, where: str) -> None:
    code, text = CASES[where]
    pid = footprint(three).ranks[1]
    request = three.submit(f"%%distributed\nimport os, signal, time\n{code}\n'met'")
    try:
        three.wait_for_output(request, "Waiting for rank 1 (stopped")
        three.wait_for_output(request, text)
    finally:
        os.kill(pid, signal.SIGCONT)
    still_works(three, request)


def test_suspended_rank_is_named_with_its_call(three: Kernel, tmp_path: Path) -> None:
    come, pid = tmp_path / "come", footprint(three).ranks[1]
    wait = f"while rank == 2 and not os.path.exists({str(come)!r}): time.sleep(0.02)"
    request = three.submit(
        f"%%distributed\nimport os, time\n{wait}\ndist.barrier()\ndist.all_reduce(torch.ones(1))\n'met'"
    )
    three.wait_for_output(request, "Waiting for rank 2 (line 3): ranks 0-1 have been in barrier")
    os.kill(pid, signal.SIGSTOP)
    try:
        come.touch()
        three.wait_for_output(
            request, "(stopped in barrier at line 4): ranks 0,2 have been in all_reduce at line 5 for"
        )
    finally:
        os.kill(pid, signal.SIGCONT)
    still_works(three, request)


def still_works(three: Kernel, request: str) -> None:
    """The cell ends, and ranks can communicate."""
    assert three.collect(request).ok
    after = three.ok("%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()")
    assert after.lines() == ["[ranks 0-2] 3.0"]
