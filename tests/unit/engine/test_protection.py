"""The state is saved at the end of each step's iteration, in slots of a file that outlives its process."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from axon_nb.engine.protection.protection import at_end_of_iteration
from axon_nb.engine.protection.slots import Header, SlotMemory, read_bytes, read_headers

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

FIRST = Header("run", (0, 0), 0, 1, 2, 3)
SECOND = Header("run", (1, 0), 1, 4, 5, 6)


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


@pytest.fixture
def file() -> Iterator[int]:
    """An anonymous file."""
    fd = os.memfd_create("test")
    yield fd
    os.close(fd)


def filled(memory: SlotMemory, value: int, size: int) -> torch.Tensor:
    """A buffer with this value in each byte."""
    return memory.allocate(size).fill_(value)


def test_latest_complete_slot_comes_first(file: int) -> None:
    memory = SlotMemory(file)
    assert read_headers(file) == {}
    memory.publish(0, FIRST)
    memory.publish(1, SECOND)
    assert list(read_headers(file).items()) == [(1, SECOND), (0, FIRST)]
    memory.invalidate(1)
    assert read_headers(file) == {0: FIRST}


@pytest.mark.parametrize("written", range(9))
def test_header_cut_off_at_any_byte_is_no_slot(file: int, written: int) -> None:
    memory = SlotMemory(file)
    memory.publish(0, FIRST)
    memory.invalidate(1)
    memory.publish(1, SECOND)
    page = os.pread(file, 1024, 1024)
    length = int.from_bytes(page[8:12], "little")
    cut = [0, 1, 8, 12, 16, 17, 16 + length // 2, 15 + length, 20][written]
    os.pwrite(file, bytes(1024 - cut), 1024 + cut)
    if cut < 16 + length:
        assert read_headers(file) == {0: FIRST}


def test_copies_lie_where_they_are_said_to(file: int) -> None:
    memory = SlotMemory(file)
    for value, size in enumerate((1, 64, 1000, 1 << 20, 100 << 20)):
        buffer = filled(memory, value, size)
        assert read_bytes(file, memory.offset(buffer) + size - 1, 1) == bytes([value])


def test_memory_of_two_slots_is_used_in_turn(file: int) -> None:
    memory, slots = SlotMemory(file), [filled(SlotMemory(file), 0, 1)] * 0
    for step in range(20):
        if len(slots) == 2:
            memory.release(slots.pop(0))
        slots.append(filled(memory, step, (1 << 20) + 100 * step))
        memory.trim()
    assert os.fstat(file).st_blocks * 512 < 3 << 20


def test_successor_keeps_the_file_until_it_has_copied_it(file: int) -> None:
    before = SlotMemory(file)
    place = before.offset(filled(before, 7, 1 << 20))
    before.publish(0, FIRST)
    after = SlotMemory(file)
    filled(after, 9, 1 << 20)
    assert read_bytes(file, place, 1 << 20) == bytes([7]) * (1 << 20)
    after.publish(1, SECOND)
    assert next(iter(read_headers(file).values())) == SECOND
    after.invalidate(0)
    after.forget_predecessor()
    assert read_headers(file) == {1: SECOND}
    assert os.fstat(file).st_blocks * 512 < 2 << 20
    after.clear()
    assert os.fstat(file).st_size == 0


def test_file_that_ends_too_early_is_refused(file: int) -> None:
    with pytest.raises(ValueError, match="incomplete"):
        read_bytes(file, 0, 10)
