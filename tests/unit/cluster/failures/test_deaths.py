"""How a death reads."""

from __future__ import annotations

from typing import Any

import pytest

from axon_nb.cluster.failures import crash_location, describe_death, last_line
from axon_nb.records.protocol.agent import Exit

CRASH = """Fatal Python error: {what}

Thread 0x00007fd8f6ffd6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

{head} 0x00007fd932aa3b80{name} (most recent call first):
{frames}  File "/x/site-packages/IPython/core/interactiveshell.py", line 3823 in run_code
  File "/x/site-packages/IPython/core/interactiveshell.py", line 3762 in run_ast_nodes

Extension modules: numpy._core._multiarray_umath, torch._C (total: 2)
"""
CELL = '  File "<ipython-input-3-9f2c61d0a1b4>", line 3 in <module>\n'
CTYPES = '  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at\n'
ELSEWHERE = ", in another thread (threading wait)"
POOL = '  File "/usr/lib/python3.11/multiprocessing/pool.py", line 364 in map\n'
REDUCE = (
    '  File "/home/me/axon_nb/engine/groups/work.py", line 81 in wait\n'
    '  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce\n'
    '  File "/x/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper\n'
)
STEP = '  File "<ipython-input-3-9f2c61d0a1b4>", line 9 in step\n'
GLOO = "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  [enforce fail] 8 vs 4.\n\n"


def crash(frames: str, *, what: str = "Aborted", head: str = "Current thread", name: str = "") -> str:
    return CRASH.format(what=what, head=head, frames=frames, name=name)


@pytest.mark.parametrize(
    ("event", "text"),
    [
        ({"code": 3}, "exited with code 3"),
        ({"code": 0}, "exited with code 0"),
        ({"code": -15}, "was killed by SIGTERM"),
        ({"code": -250}, "was killed by signal 250"),
        ({"code": -9, "out_of_memory": True}, "was killed by SIGKILL: out of memory"),
        ({"code": -9, "out_of_memory": None}, "was killed by SIGKILL (out of memory?)"),
        ({"code": -9, "out_of_memory": False}, "was killed by SIGKILL"),
        ({"code": -15, "out_of_memory": None}, "was killed by SIGTERM"),
        ({"code": -15, "host": "far"}, "was killed by SIGTERM on the host 'far'"),
        ({"code": 0, "host": "far", "host_lost": "it is off"}, "was lost with its host 'far': it is off"),
        ({"code": 1, "last_output": "a\nlast one  \n\n"}, "exited with code 1; last line: last one"),
        ({"code": -11, "crash": crash(CTYPES + CELL)}, "was killed by SIGSEGV at line 3 (ctypes string_at)"),
        (
            {"code": -6, "last_output": GLOO, "crash": crash(REDUCE + CELL)},
            "was killed by SIGABRT at line 3 (distributed_c10d all_reduce); last line: what():  [enforce fail] 8 vs 4.",
        ),
    ],
)
def test_death_is_worded(event: dict[str, Any], text: str) -> None:
    assert describe_death(Exit(rank=0, pid=1, time_ns=0, **event)) == text


@pytest.mark.parametrize(
    ("report", "place"),
    [
        (crash(CELL), " at line 3"),
        (crash(STEP + CELL), " at line 3"),
        (crash(CTYPES + STEP + CELL), " at line 3 (ctypes string_at)"),
        (crash(POOL + CTYPES + STEP + CELL), " at line 3 (ctypes string_at … pool map)"),
        (crash(CELL, head="Thread"), " at line 3, in a thread of C code"),
        (crash(CELL, head="Thread").replace("Thread", "Current thread", 1), f" at line 3{ELSEWHERE}"),
        (crash(CELL, name=" [python3]"), " at line 3"),
        ("Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n  <no Python frame>\n", ""),
        ("no report", ""),
        ("", ""),
    ],
)
def test_crash_line(report: str, place: str) -> None:
    assert crash_location(report) == place


def test_crash_report_is_not_the_last_output_line() -> None:
    assert last_line("before\n" + crash(CELL)) == "before"
    assert last_line(crash(CELL)) == ""
    assert len(last_line("x" * 10_000)) == 300
