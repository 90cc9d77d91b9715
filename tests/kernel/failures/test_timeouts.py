"""Timeouts that the user sets end a call on time, although its peer comes later."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.kernel import Kernel

CALLS = {
    "recv on a group with a timeout": """
own = dist.new_group([0, 1], timeout=timedelta(seconds=2))
call = lambda: dist.recv(torch.ones(1), 1, group=own)
""",
    "all_reduce on a group with a timeout": """
own = dist.new_group([0, 1], timeout=timedelta(seconds=2))
call = lambda: dist.all_reduce(torch.ones(1), group=own)
""",
    "wait with a timeout": """
own = dist.new_group([0, 1])
call = lambda: dist.all_reduce(torch.ones(1), group=own, async_op=True).wait(timedelta(seconds=2))
""",
    "wait for a message with a timeout": """
own = dist.new_group([0, 1])
call = lambda: dist.irecv(torch.ones(1), 1, group=own).wait(timedelta(seconds=2))
""",
}
CELL = """%%distributed
import os, time
from datetime import timedelta
{setup}
error = None
if rank == 0:
    try:
        call()
    except RuntimeError as raised:
        error = raised
    open({there!r}, "w").close()
elif rank == 1:
    while not os.path.exists({there!r}):
        time.sleep(0.02)
print(rank, "timed out" in str(error).lower(), repr(error))
"""


@pytest.mark.parametrize("what", CALLS)
def test_user_timeout_ends_a_call_with_a_late_peer(kernel: Kernel, tmp_path: Path, what: str) -> None:
    reply = kernel.run(CELL.format(setup=CALLS[what], there=str(tmp_path / "there")))
    assert any(line.startswith("[rank 0] 0 True") for line in reply.lines()), reply.lines()
    after = kernel.run("%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()")
    assert after.lines()[-1] == "[ranks 0-3] 4.0"
