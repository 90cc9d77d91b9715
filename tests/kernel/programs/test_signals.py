"""Signal handlers of the user that raise out of a call: it is reported, and the next cell starts in step."""

from __future__ import annotations

import pytest

from tests.support.kernel import Kernel

ALARM = (
    "import signal, time\ndef late(*_):\n    raise TimeoutError('late')\nbefore = signal.signal(signal.SIGALRM, late)\n"
)
LEAVE = (
    "if rank == 0:\n    signal.alarm(1)\n    try:\n        {call}\n    except TimeoutError:\n        print('caught')\n"
    "else:\n    time.sleep(1.5)\nsignal.alarm(0)\n_ = signal.signal(signal.SIGALRM, before)"
)
CALLS = {"all_reduce": "dist.all_reduce(torch.ones(1))", "recv": "dist.recv(torch.ones(1), 1)"}


@pytest.mark.parametrize("call", CALLS)
def test_call_left_by_a_raising_handler(kernel: Kernel, call: str) -> None:
    reply = kernel.ok(f"%%distributed\n{ALARM}{LEAVE.format(call=CALLS[call])}")
    assert "[rank 0] caught" in reply.stdout
    assert f"Rank 0 left {call} at line 9 (TimeoutError) before it was over" in reply.stderr
    assert kernel.ok("%%distributed\nt = torch.ones(1); dist.all_reduce(t); t").lines() == ["[ranks 0-3] tensor([4.])"]


def test_ranks_waiting_for_a_call_left_by_a_handler(kernel: Kernel) -> None:
    late = LEAVE.format(call=CALLS["all_reduce"]).replace("time.sleep(1.5)", CALLS["all_reduce"])
    reply = kernel.run(f"%%distributed\n{ALARM}if rank == 1:\n    time.sleep(1.5)\n{late}")
    assert "Rank 0 left all_reduce at line 11 (TimeoutError) before it was over" in reply.stderr
    kernel.ok("%%distributed\nimport signal\nsignal.alarm(0)\n_ = signal.signal(signal.SIGALRM, signal.SIG_DFL)")
    assert kernel.ok("%%distributed\nt = torch.ones(1); dist.all_reduce(t); t").lines() == ["[ranks 0-3] tensor([4.])"]
