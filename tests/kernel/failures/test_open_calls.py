"""Calls that nobody waits for to the end are not listed as open once they are over."""

from __future__ import annotations

import pytest

from tests.support.kernel import Kernel

SETUP = """%%distributed
import time
from datetime import timedelta
from axon_nb.engine.groups.state import current_groups

def until(condition):
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)

def caught(call):
    try:
        call()
    except RuntimeError as error:
        return str(error)

own = dist.new_group([0, 1], timeout=timedelta(seconds=60))
brief = dist.new_group([0, 1], timeout=timedelta(seconds=1))
peer = 1 - rank
"""
CALLS = {
    "polled": """
handles = [dist.all_reduce(torch.ones(4), group=own, async_op=True) for _ in range(20)]
handles += [dist.isend(torch.ones(4), peer, group=own) for _ in range(20)]
handles += [dist.irecv(torch.ones(4), peer, group=own) for _ in range(20)]
until(lambda: all(handle.is_completed() for handle in handles))
""",
    "dropped": """
for _ in range(20):
    dist.all_reduce(torch.ones(4), group=own, async_op=True)
    dist.isend(torch.ones(4), peer, group=own)
    dist.irecv(torch.ones(4), peer, group=own)
""",
    "timed out": """
if rank == 0:
    handle = dist.all_reduce(torch.ones(4), group=own, async_op=True)
    message = dist.irecv(torch.ones(4), peer, group=own)
    assert "timed out" in caught(lambda: handle.wait(timedelta(seconds=0.2)))
    assert "timed out" in caught(lambda: message.wait(timedelta(seconds=0.2)))
    dist.send(torch.ones(1), peer, group=own, tag=1)
else:
    dist.recv(torch.ones(1), peer, group=own, tag=1)
    dist.all_reduce(torch.ones(4), group=own)
    dist.send(torch.ones(4), peer, group=own)
""",
    "failed": """
assert "must pass the same" in caught(lambda: dist.all_reduce(torch.ones(4 + rank), group=own))
handle = dist.all_reduce(torch.ones(4 + rank), group=own, async_op=True)
until(handle.is_completed)
assert "must pass the same" in caught(handle.wait)
""",
    "out of time": """
if rank == 0:
    handle = dist.irecv(torch.ones(4), peer, group=brief)
    assert "timed out" in caught(lambda: dist.all_reduce(torch.ones(4), group=brief))
    dist.send(torch.ones(1), peer, group=own)
else:
    until(dist.irecv(torch.ones(1), peer, group=own).is_completed)
""",
    "aborted": """
if rank == 0:
    handle = dist.irecv(torch.ones(4), peer, group=brief)
    other = dist.all_reduce(torch.ones(4), group=brief, async_op=True)
    brief.abort()
""",
}


@pytest.mark.parametrize("what", CALLS)
def test_finished_calls_are_not_listed_as_open(kernel: Kernel, what: str) -> None:
    kernel.ok(SETUP)
    code = "".join(f"    {line}\n" for line in CALLS[what].strip().splitlines())
    kernel.ok(f"%%distributed\nif rank < 2:\n{code}    until(lambda: not current_groups().calls.pending())\n")
    reply = kernel.ok("%%distributed\nprint([call.name for call in current_groups().calls.pending()])")
    assert reply.lines() == ["[ranks 0-3] []"]
    kernel.ok("%%distributed\ndel own, brief\ndist.barrier()")
