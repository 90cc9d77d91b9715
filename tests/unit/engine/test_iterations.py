"""The state is saved at the end of the iteration in which an optimizer stepped, in every shape of loop."""

from __future__ import annotations

import sys
import textwrap
from typing import Any

import pytest

from axon_nb.engine.protection.protection import at_end_of_iteration

FOR = """
for i in range(3):
    step()
    seen['i'] = i
seen['out'] = 1
"""
WHILE = """
n = 0
while n < 3:
    n += 1
    step()
    seen.update(
        i=n - 1
    )
    if n == 1:
        continue
"""
ONE_LINE = """
for i in range(3): step(); seen['i'] = i
"""
IN_FUNCTION = """
def one():
    step()
    seen['inner'] = 1

for i in range(3):
    one()
    seen['i'] = i
"""
NESTED = """
for j in range(3):
    for i in [j]:
        step()
        seen['i'] = i
"""
CAUGHT = """
for i in range(3):
    step()
    try:
        raise ValueError
    except ValueError:
        pass
    seen['i'] = i
"""
RETURNING = """
def one(i):
    for _ in range(9):
        step()
        return

for i in range(3):
    one(i)
    seen['i'] = i
"""


def run(code: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run a program; return what it had `seen` when each state was saved."""
    seen: dict[str, Any] = {}
    saved: list[dict[str, Any]] = []

    def step() -> None:
        at_end_of_iteration(sys._getframe(1), lambda: saved.append(dict(seen)))

    exec(f"def program():\n{textwrap.indent(code, '    ')}\nprogram()", {"step": step, "seen": seen})
    return saved, seen


@pytest.mark.parametrize("code", [FOR, WHILE, ONE_LINE, IN_FUNCTION, NESTED, CAUGHT, RETURNING])
def test_each_iteration_is_saved_at_its_end(code: str) -> None:
    saved, _ = run(code)
    assert [one["i"] for one in saved] == [0, 1, 2]
    assert not any("out" in one for one in saved)
    assert sys.gettrace() is None


def test_left_loop_is_saved_before_the_code_after_it() -> None:
    saved, seen = run(
        "for i in range(3):\n    step()\n    seen['i'] = i\n    if not i:\n        break\nseen['out'] = 1"
    )
    assert (saved, seen) == ([{"i": 0}], {"i": 0, "out": 1})


def test_step_in_no_loop_is_left_to_the_end_of_the_cell() -> None:
    namespace: dict[str, Any] = {"found": at_end_of_iteration, "sys": sys, "__name__": "__main__"}
    code = compile("def program():\n    return found(sys._getframe(), print)", "cell", "exec")
    frame_of_cells = {"__name__": "axon_nb.engine.kernel", "code": code, "namespace": namespace}
    exec("for _ in range(1):\n    exec(code, namespace); result = namespace['program']()", frame_of_cells)
    assert frame_of_cells["result"] is False
    assert sys.gettrace() is None


def test_debugger_keeps_its_trace_function() -> None:
    def trace(*_: object) -> None:
        return None

    sys.settrace(trace)
    try:
        for _ in range(1):
            assert not at_end_of_iteration(sys._getframe(), print)
        assert sys.gettrace() is trace
    finally:
        sys.settrace(None)
