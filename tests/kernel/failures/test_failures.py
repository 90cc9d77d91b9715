"""How failures read: the rank that failed first, calls that others have open, and timeouts."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from axon_nb.cluster.cells.result import MIME_TYPE
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

CALLS_WITH_TIMEOUT = {
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


def test_failed_rank_and_user_line_come_first(kernel: Kernel) -> None:
    reply = kernel.run("%%distributed\nx = 1\nif rank == 2:\n    raise ValueError(f'bad value on {rank}')")
    assert reply.status == "error"
    assert reply.ename == "CellError"
    assert reply.traceback.startswith("[rank 2]")
    assert "----> 4     raise ValueError" in reply.traceback
    assert "ValueError: bad value on 2" in reply.traceback
    assert "site-packages" not in reply.traceback
    assert "axon_nb/" not in reply.traceback
    (card,) = reply.displays
    assert set(card) == {"text/html", MIME_TYPE}, "front ends without HTML show the traceback alone"
    assert card[MIME_TYPE] == {**reply.record, "seconds": None}, "equal runs save equal outputs"
    assert "Rank 2 raised ValueError" in card["text/html"]
    assert ">raise ValueError(f&#x27;bad value on {rank}&#x27;)</mark>" in card["text/html"]
    assert "%distributed debug --ranks 2" in card["text/html"]


def test_programs_get_the_result_of_each_cell_and_front_ends_show_nothing_more(kernel: Kernel) -> None:
    worked = kernel.run("%%distributed\nx = rank")
    assert (worked.record["state"], worked.record["ranks"]) == ("ok", "0-3")
    assert (worked.displays, worked.result, worked.stdout) == ([], "", "")
    failed = kernel.run("%%distributed\nif rank == 2:\n    1 / 0\ndist.all_reduce(torch.ones(2))")
    prompt = kernel.value("len(In)") - 2
    cause = failed.record["cause"]
    assert (cause["ranks"], cause["type"], cause["file"]) == ("2", "ZeroDivisionError", f"Cell In[{prompt}]")
    assert cause["line"] == 3
    assert {"ranks": "0-1,3", "did": "aborted", "text": "waited in all_reduce at line 4"} in failed.record["groups"]


def test_traceback_names_the_notebook_prompt(kernel: Kernel) -> None:
    reply = kernel.run("%%distributed\n1 / 0")
    prompt = kernel.value("len(In)") - 2
    assert f"Cell In[{prompt}], line 2" in reply.traceback


def test_equal_failures_on_all_ranks_are_shown_once(kernel: Kernel) -> None:
    reply = kernel.run("%%distributed\ndist.barrier()\nundefined_name")
    assert reply.traceback.startswith("[ranks 0-3]")
    assert reply.traceback.count("NameError: name") == 1


def test_other_failures_take_one_line_each(kernel: Kernel) -> None:
    code = "dist.barrier()\nif rank == 1:\n    raise KeyError('a')\nif rank == 3:\n    raise TypeError('b')"
    reply = kernel.run(f"%%distributed\n{code}")
    assert "[rank 3] TypeError: b" in reply.traceback or "[rank 1] KeyError: 'a'" in reply.traceback


def test_huge_and_malformed_exceptions_are_reported(kernel: Kernel) -> None:
    odd = (
        "class Odd(Exception):\n    def __str__(self): raise RuntimeError('no text')\n    __repr__ = __str__\n"
        "if rank == 0: raise Odd()\n"
        "if rank == 1: raise ValueError('x' * 5_000_000)\n"
        "def down(n): return down(n + 1)\n"
        "if rank == 2: down(0)"
    )
    reply = kernel.run(f"%%distributed\n{odd}")
    assert reply.status == "error"
    assert len(reply.traceback) < 500_000
    assert kernel.ok("%%distributed\n'alive'").lines() == ["[ranks 0-3] 'alive'"]


def test_error_text_is_read_once(kernel: Kernel) -> None:
    code = (
        "reads = []\nclass Counted(Exception):\n    def __str__(self): reads.append(1); return 'its text'\n"
        "if rank == 1:\n    raise Counted() from KeyError('its cause')"
    )
    reply = kernel.run(f"%%distributed\n{code}")
    assert reply.traceback.startswith("[rank 1]")
    assert "Counted: its text" in reply.traceback
    assert "KeyError: 'its cause'" in reply.traceback
    assert kernel.ok("%%distributed\nlen(reads)").lines() == ["[ranks 0,2-3] 0", "[rank 1] 1"]


def test_error_without_text_is_reported_with_traceback(kernel: Kernel) -> None:
    code = "class Odd(Exception):\n    def __str__(self): raise SystemExit\nif rank == 1: raise Odd()"
    reply = kernel.run(f"%%distributed\n{code}")
    assert "Odd: <exception str() failed>" in reply.traceback
    assert "----> 4 if rank == 1: raise Odd()" in reply.traceback


def test_exception_group_is_shown_with_its_exceptions(kernel: Kernel) -> None:
    code = "if rank == 1:\n    raise ExceptionGroup('several', [ValueError('one'), TypeError('two')])\ndist.barrier()"
    reply = kernel.run(f"%%distributed\n{code}")
    assert reply.traceback.startswith("[rank 1]")
    for text in (
        "line 3, in <module>",
        "ExceptionGroup: several (2 sub-exceptions)",
        "ValueError: one",
        "TypeError: two",
    ):
        assert text in reply.traceback
    assert "interactiveshell.py" not in reply.traceback
    assert reply.stderr == ""


def test_lone_surrogates_become_question_marks(kernel: Kernel) -> None:
    code = "class Odd:\n    def __repr__(self): return 'result \\ud800'\nprint('text \\ud800')\nOdd()"
    assert kernel.ok(f"%%distributed\n{code}").lines() == ["[ranks 0-3] text ?", "[ranks 0-3] result ?"]
    reply = kernel.run("%%distributed\nif rank == 1: raise ValueError('error \\ud800')\ndist.barrier()")
    assert reply.traceback.startswith("[rank 1]")
    assert "ValueError: error ?" in reply.traceback


def test_output_before_a_failure_is_kept(kernel: Kernel) -> None:
    reply = kernel.run("%%distributed\ndist.barrier()\nprint('before')\nif rank == 3:\n    raise ValueError('x')")
    assert reply.lines() == ["[ranks 0-3] before"]


def test_dead_rank_is_reported(kernel: Kernel) -> None:
    reply = kernel.run("%%distributed\nimport os, signal\nif rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)")
    assert reply.ename == "CellError"
    assert "rank 1 was killed by SIGKILL" in reply.traceback
    assert "`%distributed repair`" in reply.traceback
    assert reply.beside_card == "CellError: rank 1 was killed by SIGKILL", "the card says the rest"
    later = kernel.run("%%distributed\n1")
    assert "Rank 1 was killed by SIGKILL" in later.traceback
    assert kernel.ok("%%distributed --ranks 0,2-3\n'alive'").lines() == ["[ranks 0,2-3] 'alive'"]
    kernel.ok("%distributed restart")
    assert kernel.ok("%%distributed\n'alive'").lines() == ["[ranks 0-3] 'alive'"]


IDIOMS = {
    "a closed file as stdout": "with open(os.devnull, 'w') as file:\n    sys.stdout = file",
    "a closed file as stderr, and an error": "with open(os.devnull, 'w') as file:\n    sys.stderr = file\n1 / 0",
    "no stdout": "sys.stdout = None",
    "neither": "sys.stdout = sys.stderr = None\n1 / 0",
    "a stdout that cannot be flushed": "class Out:\n    def write(self, text): pass\nsys.stdout = Out()",
    "an error whose class has no name": (
        "class Kind(type):\n    @property\n    def __name__(cls): raise RuntimeError('no name')\n"
        "class Odd(Exception, metaclass=Kind): pass\nraise Odd()"
    ),
}


@pytest.mark.parametrize("what", IDIOMS)
def test_cell_ends_with_broken_streams(kernel: Kernel, what: str) -> None:
    reply = kernel.run(f"%%distributed\nimport os, sys\nif rank == 1:\n{textwrap.indent(IDIOMS[what], '    ')}")
    assert reply.ok == ("error" not in what and what != "neither"), reply.traceback
    assert kernel.ok("%%distributed\nprint('heard')\ndist.barrier()").lines() == ["[ranks 0-3] heard"]


@pytest.mark.parametrize("streams", ["None", "type('Broken', (), {'write': lambda self, text: len(text)})()"])
def test_error_is_reported_if_streams_cannot_be_flushed(kernel: Kernel, streams: str) -> None:
    code = f"import sys\nsys.stdout = sys.stderr = {streams}\nraise ValueError('own bug')"
    reply = kernel.run(f"%%distributed\nif rank == 1:\n{textwrap.indent(code, '    ')}")
    assert reply.traceback.startswith("[rank 1]")
    assert "ValueError: own bug" in reply.traceback
    assert kernel.ok("%%distributed\nprint('heard')\ndist.barrier()").lines() == ["[ranks 0-3] heard"]


def test_working_user_stream_is_kept(kernel: Kernel) -> None:
    kernel.ok("%%distributed\nimport io, sys\nt_own, sys.stdout = sys.stdout, io.StringIO()")
    assert kernel.ok("%%distributed\nprint('kept')").lines() == []
    kernel.ok("%%distributed\nt_text, sys.stdout = sys.stdout.getvalue(), t_own")
    assert kernel.ok("%%distributed\nt_text").lines() == ["[ranks 0-3] 'kept\\n'"]


REPLACED = {
    "functions of json": (
        "import json\nt_kept = dict(vars(json))\njson.dumps = json.loads = None",
        "vars(json).update(t_kept)",
    ),
    "print and open": (
        "import builtins\nt_kept = dict(vars(builtins))\nbuiltins.print = builtins.open = None",
        "vars(builtins).update(t_kept)",
    ),
    "removed builtins": (
        "import builtins\nfor t_name in ('len', 'isinstance', 'getattr', 'print', 'open'): delattr(builtins, t_name)",
        "pass",
    ),
    "functions of signal": (
        "import signal\nt_kept = dict(vars(signal))\nfor t_name in t_kept: setattr(signal, t_name, None)",
        "vars(signal).update(t_kept)",
    ),
    "functions of time": (
        "import time\nt_kept = dict(vars(time))\nfor t_name in t_kept: setattr(time, t_name, None)",
        "vars(time).update(t_kept)",
    ),
    "the default device": ("torch.set_default_device('meta')", "torch.set_default_device(None)"),
    "the default dtype": ("torch.set_default_dtype(torch.float64)", "torch.set_default_dtype(torch.float32)"),
    "its namespace": ("%reset -f", "pass"),
}


@pytest.mark.parametrize("what", REPLACED)
def test_rank_survives_replaced_functions(kernel: Kernel, what: str) -> None:
    code, undo = REPLACED[what]
    kernel.ok(f"%%distributed --ranks 1\n{code}")
    reply = kernel.run("%%distributed\nif rank == 1: raise ValueError('bug')\ndist.barrier()")
    assert reply.traceback.startswith("[rank 1]")
    assert "ValueError: bug" in reply.traceback
    kernel.ok(f"%%distributed --ranks 1\n{undo}")
    after = kernel.ok("%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nprint(world_size)\nt.item()")
    assert after.lines() == ["[ranks 0-3] 4", "[ranks 0-3] 4.0"]


SHOWN_BY = {
    "rich.traceback": (
        "from rich.traceback import install\n_ = install()",
        "for t_name in ('_showtraceback', 'showtraceback', 'showsyntaxerror'): delattr(get_ipython(), t_name)",
        "in boom:3",
    ),
    "set_custom_exc": (
        (
            "def show(shell, kind, error, trace, tb_offset=None): print('shown by me:', error)\n"
            "get_ipython().set_custom_exc((BaseException,), show)"
        ),
        "get_ipython().set_custom_exc((), None)",
        "shown by me: division by zero",
    ),
    "IPython's own method": (
        (
            "from IPython import InteractiveShell\nt_kept = InteractiveShell.showtraceback\n"
            "InteractiveShell.showtraceback = lambda *_, **__: print('shown by me:', sys.exc_info()[1])"
        ),
        "InteractiveShell.showtraceback = t_kept",
        "shown by me: division by zero",
    ),
}


@pytest.mark.parametrize("what", SHOWN_BY)
def test_errors_shown_by_other_code(kernel: Kernel, what: str, tmp_path: Path) -> None:
    install, undo, shown = SHOWN_BY[what]
    if what == "rich.traceback":
        pytest.importorskip("rich")
    (tmp_path / "waits.py").write_text("import torch.distributed as dist\ndist.barrier()\n")
    kernel.ok(f"%%distributed\nimport sys\n{install}")
    failing = "def boom():\n    1 / 0\nif rank == 1: boom()\n"
    top = kernel.run(f"%%distributed\n{failing}dist.barrier()")
    nested = kernel.run(f"%%distributed\n{failing}%run {tmp_path}/waits.py")
    kernel.ok(f"%%distributed\n{undo}")
    for reply in (top, nested):
        assert shown in reply.stdout + reply.stderr
        assert re.search(r"Cell In\[\d+\], line 3, in boom\n.*ZeroDivisionError: division by zero", reply.traceback)
        assert "interactiveshell.py" not in reply.stdout + reply.stderr + reply.traceback
    assert "[ranks 0,2-3] waited in barrier at line 5" in top.traceback
    if what != "IPython's own method":  # `%run` calls nothing else
        assert "[ranks 0,2-3] waited in barrier at line 5" in nested.traceback
    assert "line 3, in boom()" in kernel.run(f"%%distributed --ranks 1\n{failing}").traceback


def test_errors_shown_by_rich_in_the_notebook_are_without_our_frames(kernel: Kernel) -> None:
    pytest.importorskip("rich")
    kernel.ok(
        "t_shell = get_ipython()\nfrom rich.traceback import install\n"
        "t_kept = {t_n: vars(t_shell).get(t_n) for t_n in ('_showtraceback', 'showtraceback', 'showsyntaxerror')}\n"
        "_ = install()"
    )
    replies = [kernel.run(cell) for cell in ("%%distributed\n1 / 0", "%pull nothing_there --ranks 0")]
    kernel.ok(
        "for t_n, t_value in t_kept.items():\n    delattr(t_shell, t_n)\n"
        "    if t_value is not None: setattr(t_shell, t_n, t_value)"
    )
    for reply, kind in zip(replies, ("CellError", "UsageError"), strict=True):
        shown = "\n".join(data.get("text/plain", "") for data in reply.displays)
        assert kind in shown
        assert "axon_nb/" not in shown, "only the line of the cell"


def test_exit_with_which_a_library_answers_an_abort_is_the_abort(kernel: Kernel) -> None:
    reply = kernel.run(
        "%%distributed\nimport time\ndef fit():\n    try:\n        while True: time.sleep(0.01)\n"
        "    except KeyboardInterrupt:\n        raise SystemExit(1)\nif rank == 1: raise ValueError('bug')\nfit()"
    )
    assert "[ranks 0,2-3] were interrupted at line 9 (fit, " in reply.traceback  # not "SystemExit: 1"


@pytest.mark.parametrize("handler", ["signal.SIG_DFL", "signal.SIG_IGN", "lambda *_: None"])
def test_cell_with_replaced_sigint_handler_is_interrupted(kernel: Kernel, handler: str) -> None:
    code = f"import signal, time\nsignal.signal(signal.SIGINT, {handler})\nprint('go', flush=True)"
    request = kernel.submit(f"%%distributed\n{code}\nwhile True: time.sleep(0.1)")
    kernel.wait_for_output(request, "go", ranks=range(4))
    kernel.interrupt()
    assert kernel.collect(request).traceback.startswith("KeyboardInterrupt: Ranks 0-3 stopped.")
    assert kernel.ok("%%distributed\n'alive'").lines() == ["[ranks 0-3] 'alive'"]


@pytest.mark.parametrize("what", CALLS)
def test_finished_calls_are_not_listed_as_open(kernel: Kernel, what: str) -> None:
    kernel.ok(SETUP)
    code = "".join(f"    {line}\n" for line in CALLS[what].strip().splitlines())
    kernel.ok(f"%%distributed\nif rank < 2:\n{code}    until(lambda: not current_groups().calls.pending())\n")
    reply = kernel.ok("%%distributed\nprint([call.name for call in current_groups().calls.pending()])")
    assert reply.lines() == ["[ranks 0-3] []"]
    kernel.ok("%%distributed\ndel own, brief\ndist.barrier()")


@pytest.mark.parametrize("what", CALLS_WITH_TIMEOUT)
def test_user_timeout_ends_a_call_with_a_late_peer(kernel: Kernel, tmp_path: Path, what: str) -> None:
    reply = kernel.run(CELL.format(setup=CALLS_WITH_TIMEOUT[what], there=str(tmp_path / "there")))
    assert any(line.startswith("[rank 0] 0 True") for line in reply.lines()), reply.lines()
    after = kernel.run("%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()")
    assert after.lines()[-1] == "[ranks 0-3] 4.0"
