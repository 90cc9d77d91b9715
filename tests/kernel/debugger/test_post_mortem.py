"""`%distributed debug`: a debugger on the last failure of one rank, through the notebook's input."""

from __future__ import annotations

from pathlib import Path

from tests.support.completion import plain
from tests.support.kernel import Kernel, Reply
from tests.support.processes import until

FAIL = """%%distributed
def inner(scale):
    secret = rank * scale
    raise ValueError(f"on rank {rank}")
def outer():
    outside = "the caller's"
    inner(100)
if rank == 2:
    outer()
dist.barrier()
"""


def _debug(kernel: Kernel, line: str, commands: list[str]) -> Reply:
    request = kernel.submit(line)
    for command in commands:
        prompt = kernel.client.get_stdin_msg(timeout=100)
        assert prompt["content"]["prompt"].startswith("ipdb rank ")
        kernel.client.input(command)
    reply = kernel.collect(request)
    reply.stdout = plain(reply.stdout)
    return reply


def test_debugger_opens_on_the_failed_rank_only(kernel: Kernel) -> None:
    assert "on rank 2" in kernel.run(FAIL).traceback
    reply = _debug(kernel, "%distributed debug", ["p secret", "u", "p outside", "p rank, inner", "q"])
    assert reply.ok
    assert reply.stdout.startswith("Rank 2: ValueError: on rank 2.")
    assert "raise ValueError" in reply.stdout
    assert "200" in reply.stdout
    assert "the caller's" in reply.stdout
    # What failed can be looked at again, until the next cell; the group works all the time.
    assert "200" in _debug(kernel, "%distributed debug --ranks 2", ["p secret", "EOF"]).stdout
    assert kernel.ok("%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()").lines() == ["[ranks 0-3] 4.0"]
    assert "No rank has a failure to debug" in kernel.run("%distributed debug").traceback


def test_expressions_statements_and_mistakes(kernel: Kernel) -> None:
    kernel.run(FAIL)
    reply = _debug(
        kernel,
        "%distributed debug",
        [
            "secret + 1",
            "new = secret * 3",
            "new",
            "print('said on the rank')",
            "p nothing_there",
            "outer?",
            "w;; p 7 * 11",
            "c",
        ],
    )
    assert reply.ok
    for text in ("201", "600", "said on the rank", "NameError", "outer()", "Signature:", "77"):
        assert text in reply.stdout


def test_hung_command_can_be_interrupted(kernel: Kernel, tmp_path: Path) -> None:
    kernel.run(FAIL)
    request = kernel.submit("%distributed debug")
    kernel.client.get_stdin_msg(timeout=100)
    flag = tmp_path / "hangs"
    kernel.client.input(f"__import__('pathlib').Path({str(flag)!r}).touch() or __import__('time').sleep(600)")
    assert until(flag.exists)
    kernel.interrupt()
    kernel.client.get_stdin_msg(timeout=100)
    kernel.client.input("p secret")
    kernel.client.get_stdin_msg(timeout=100)
    kernel.client.input("q")
    reply = kernel.collect(request)
    assert reply.ok
    assert "200" in reply.stdout


def test_missing_traceback_is_reported(kernel: Kernel) -> None:
    kernel.run(FAIL)
    reply = kernel.run("%distributed debug --ranks 1")
    assert "Rank 1 has no failure to debug" in reply.traceback
    assert "There is one on rank 2." in reply.traceback
    assert "one rank at a time" in kernel.run("%distributed debug --ranks 1-2").traceback
    kernel.ok("%distributed config debug=off")
    kernel.run(FAIL)
    reply = kernel.run("%distributed debug")
    kernel.ok("%distributed config debug=on")
    assert "failures are not kept (`%distributed config debug=off`)" in reply.traceback


def test_front_end_without_input_is_reported(kernel: Kernel) -> None:
    kernel.run(FAIL)
    reply = kernel.collect(str(kernel.client.execute("%distributed debug", allow_stdin=False)))
    assert reply.ename == "UsageError"
    assert "this one has none" in reply.traceback
