"""Breakpoints on ranks, and the post-mortem debugger."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from axon_nb.remote.tools import NotebookClient, connect
from tests.support.completion import plain
from tests.support.kernel import Kernel, Reply
from tests.support.processes import until

STEP = """%%distributed
def step(x):
    y = x + rank
    breakpoint()
    dist.all_reduce(y)
    return y
total = step(torch.ones(1))
print("total", total.item())
"""
WAIT_OR_PAUSE = """%%distributed
import pathlib, time
flag = pathlib.Path({flag!r})
if rank == 3:
    while not flag.exists():
        time.sleep(0.05)
    raise ValueError('odd')
breakpoint()
"""
PAUSE_ONE = """%%distributed
import datetime, pdb
group, x = dist.new_group(timeout=datetime.timedelta(seconds=2)), torch.ones(1)
if rank == 1:
    pdb.set_trace()
dist.all_reduce(x, group=group)
dist.destroy_process_group(group)
print(x.item())
"""
OTHER_DEBUGGERS = """%%rank 1
import pdb
from IPython.core.debugger import Pdb, set_trace
def add(n):
    total = n + 1
    set_trace()
    return total
print('sum', add(1))
Pdb().set_trace()
try:
    add.missing
except AttributeError as error:
    pdb.post_mortem(error.__traceback__)
print('over')
"""
SUM = """%%distributed --break {call}
x = torch.ones(1)
for _ in range(3):
    dist.all_reduce(x)
print('x', x.item())
"""
DDP = "torch.nn.parallel.DistributedDataParallel"
GROUP_WORKS = "%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()"

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


def _prompt(kernel: Kernel) -> str:
    return str(kernel.client.get_stdin_msg(timeout=100)["content"]["prompt"])


def _drive(kernel: Kernel, code: str, commands: list[str]) -> Reply:
    """Run a cell, and type a command at each prompt."""
    request = kernel.submit(code)
    for command in commands:
        assert _prompt(kernel).startswith("ipdb rank ")
        kernel.client.input(command)
    reply = kernel.collect(request)
    reply.stdout = plain(reply.stdout)
    return reply


def _states(notebook: NotebookClient) -> list[str]:
    return [row["state"] for row in notebook.request("status")["ranks"]]


def test_all_ranks_pause_and_move_together(kernel: Kernel) -> None:
    commands = ["h", "p y.item()", "rank 2", "p y.item()", "rank 9", "all p rank * 11", "n", "n", "p y.item()", "c"]
    reply = _drive(kernel, STEP, commands)
    assert reply.ok, reply.traceback
    lines = reply.lines()
    assert "Ranks 0-3 paused at line 4. " in reply.stdout
    for line in ("[rank 0] 1.0", "[rank 2] 3.0", "[rank 3] 33", "[rank 2] 10.0", "[ranks 0-3] total 10.0"):
        assert line in lines
    assert reply.stdout.count("`all p x` asks each") == 2, "`h` says what pdb's own help does not"
    assert "rank 9: choose one of the paused ranks, 0, 1, 2, 3." in lines
    assert "Ranks 0-3 paused at line 6." in lines
    assert not any("skipped" in line for line in lines)


def test_other_debuggers_pause_as_breakpoint_does(kernel: Kernel) -> None:
    """IPython's, which ipdb opens, where the program says so and on an error."""
    reply = _drive(kernel, OTHER_DEBUGGERS, ["total = 40", "n", "c", "p rank * 7", "c", "p type(error)", "c"])
    assert reply.ok, reply.traceback
    lines = reply.lines()
    for line in ("[rank 1] sum 40", "[rank 1] 7", "[rank 1] <class 'AttributeError'>", "[rank 1] over"):
        assert line in lines
    assert all(f"Rank 1 paused at line {line}." in reply.stdout for line in (6, 7, 9))


def test_ranks_that_wait_for_a_paused_one_go_on_with_it(kernel: Kernel, tmp_path: Path) -> None:
    (tmp_path / "paused_model.py").write_text(
        "def forward(x):\n    hidden = x * 3\n    breakpoint()\n    return hidden\n"
    )
    code = (
        f"%%distributed\nimport sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport paused_model\nx = torch.ones(1)\n"
        "if rank == 1:\n    x = paused_model.forward(x)\ndist.all_reduce(x)\nprint(x.item())"
    )
    reply = _drive(kernel, code, ["p hidden", "hidden = hidden + 1", "s", "s", "s", "n", "c"])
    assert reply.ok, reply.traceback
    assert "Rank 1 paused at paused_model.py line 3. " in reply.stdout
    assert "tensor([3.])" in reply.stdout
    assert {"Rank 1 paused at line 8.", "Rank 1 paused at line 9.", "[rank 1] 7.0"} <= set(reply.lines())


def test_quit_and_interrupt_end_the_cell_on_all_ranks(kernel: Kernel) -> None:
    for end in ("q", "interrupt"):
        request = kernel.submit(STEP)
        assert _prompt(kernel) == "ipdb rank 0> "
        kernel.client.input(end) if end == "q" else kernel.interrupt()
        assert "KeyboardInterrupt" in plain(kernel.collect(request).traceback)
        assert kernel.ok(GROUP_WORKS).lines() == ["[ranks 0-3] 4.0"]


def test_others_see_who_is_paused_and_who_waits_for_the_debugger(kernel: Kernel) -> None:
    request = kernel.submit(PAUSE_ONE)
    assert _prompt(kernel) == "ipdb rank 1> "
    notebook = connect("shared")
    # longer than the group's timeout
    assert until(lambda: re.search(r"the debugger on rank 1, for [3-9]\.", _states(notebook)[0]))
    states = _states(notebook)
    assert states[1] == "paused at line 5"
    assert states[0].startswith("waiting in all_reduce at line 6 for the debugger on rank 1")
    why = notebook.request("explain")
    assert (why["kind"], why["waited_for"]) == ("paused", "1")
    assert why["verdict"] == "Rank 1 paused at line 5: the debugger waits for a command in the notebook."
    kernel.client.input("c")
    assert kernel.collect(request).lines()[-1] == "[ranks 0-3] 4.0"


def test_failing_rank_ends_the_pause_of_the_others(kernel: Kernel, tmp_path: Path) -> None:
    flag = tmp_path / "fail"
    request = kernel.submit(WAIT_OR_PAUSE.format(flag=str(flag)))
    _prompt(kernel)  # nobody answers it
    flag.touch()
    assert "ValueError: odd" in plain(kernel.collect(request).traceback)
    assert kernel.ok(GROUP_WORKS).lines() == ["[ranks 0-3] 4.0"]


def test_death_of_a_paused_rank_ends_the_cell(kernel: Kernel) -> None:
    pid = int(kernel.ok("%%rank 2\nimport os\nprint(os.getpid())").lines()[0].split()[-1])
    request = kernel.submit("%%distributed\nbreakpoint()")
    _prompt(kernel)
    os.kill(pid, signal.SIGKILL)
    assert "rank 2" in plain(kernel.collect(request).traceback).lower()
    kernel.ok("%distributed repair", timeout=120)
    assert kernel.ok(GROUP_WORKS).lines() == ["[ranks 0-3] 4.0"]


def test_breakpoint_is_skipped_where_nobody_can_be_asked(kernel: Kernel) -> None:
    kernel.ok("%%distributed --noblock --out job\nbreakpoint()\nbreakpoint()\nprint('done')")
    text = kernel.ok("print(job.result().text[0])").stdout
    assert text.count("breakpoint() skipped") == 1
    assert "done" in text
    in_thread = "%%distributed\nimport threading\nt = threading.Thread(target=breakpoint)\nt.start()\nt.join()"
    assert "breakpoint() skipped: it was called in a thread" in kernel.ok(in_thread).stderr


def test_debug_pauses_before_the_first_line(kernel: Kernel) -> None:
    code = "%%distributed --debug --ranks 1-2\nx = rank * 5\ny = x + 1\nprint('y', y)"
    reply = _drive(kernel, code, ["n", "p x", "x = 70", "c"])
    assert reply.ok, reply.traceback
    assert "Ranks 1-2 paused at line 2. " in reply.stdout
    assert {"Ranks 1-2 paused at line 3.", "[rank 1] 5", "[rank 1] y 71", "[rank 2] y 11"} <= set(reply.lines())


def test_break_pauses_before_the_call(kernel: Kernel) -> None:
    reply = _drive(kernel, SUM.format(call="all_reduce:2"), ["p x.item()", "x.zero_()", "c"])
    assert reply.ok, reply.traceback
    assert {"[rank 0] 4.0", "[ranks 0-3] x 48.0"} <= set(reply.lines())
    missing = kernel.ok(SUM.format(call="all_gather"))
    assert "--break all_gather: the cell made no such call." in missing.stderr
    assert "must be a function such as all_reduce" in kernel.run(SUM.format(call="all_reduce:0")).traceback


def test_break_pauses_in_the_backward_of_a_ddp_model(kernel: Kernel) -> None:
    kernel.ok(f"%%distributed\nmodel = {DDP}(torch.nn.Linear(2, 1))\nmodel(torch.ones(1, 2)).sum().backward()")
    reply = _drive(kernel, "%%distributed --break all_reduce\nmodel(torch.ones(1, 2)).sum().backward()", ["c"])
    assert reply.ok, reply.traceback
    assert "Ranks 0-3 paused at line 2. " in reply.stdout


def test_debugger_opens_on_the_failed_rank_only(kernel: Kernel) -> None:
    assert "on rank 2" in kernel.run(FAIL).traceback
    reply = _drive(kernel, "%distributed debug", ["p secret", "u", "p outside", "p rank, inner", "q"])
    assert reply.ok
    assert reply.stdout.startswith("Rank 2: ValueError: on rank 2.")
    assert "raise ValueError" in reply.stdout
    assert "200" in reply.stdout
    assert "the caller's" in reply.stdout
    # What failed can be looked at again, until the next cell; the group works all the time.
    assert "200" in _drive(kernel, "%distributed debug --ranks 2", ["p secret", "EOF"]).stdout
    assert kernel.ok("%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()").lines() == ["[ranks 0-3] 4.0"]
    assert "No rank has a failure to debug" in kernel.run("%distributed debug").traceback


def test_expressions_statements_and_mistakes(kernel: Kernel) -> None:
    kernel.run(FAIL)
    reply = _drive(
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
