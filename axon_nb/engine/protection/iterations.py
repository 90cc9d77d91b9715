"""Finds the end of the iteration in which an optimizer step was made: there the step's bookkeeping is complete.

After `optimizer.step` come `scheduler.step`, `zero_grad`, counters and logs. So the state is saved when the innermost
loop around the step begins its next iteration, or is left, rather than in the step. A trace function of that one frame
notices it; it is removed at once, and slows nothing but the calls in between.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

_OUTSIDE = ("IPython.", "ipykernel.", "ipyparallel.", "axon_nb.engine.")
"""Modules that run cells: their loops are not the user's."""
_IN_STEP = "torch."


def at_end_of_iteration(frame: FrameType | None, action: Callable[[], None]) -> bool:
    """Call `action` when the innermost loop around a step ends its iteration.

    Args:
        frame: The frame that called the step.
        action: Called once, on the same thread.

    Returns:
        False: no loop of the user is around the step, or a debugger traces this thread; nothing will be called.
    """
    if sys.gettrace() is not None:
        return False
    found = _innermost_loop(frame)
    if found is None:
        return False
    around, loop = found

    def end() -> None:
        around.f_trace = None
        sys.settrace(None)

    def trace(traced: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and (traced.f_lineno == loop.line or traced.f_lasti not in loop.instructions):
            end()
            action()
            return None
        if event == "return":
            end()
            at_end_of_iteration(traced.f_back, action)
            return None
        return trace

    around.f_trace = trace
    sys.settrace(lambda *_: None)
    return True


class _Loop:
    """A loop of some code: the range of its instructions, and the line of its header."""

    def __init__(self, instructions: range, line: int) -> None:
        self.instructions = instructions
        self.line = line


def _innermost_loop(frame: FrameType | None) -> tuple[FrameType, _Loop] | None:
    while frame is not None:
        module = f"{frame.f_globals.get('__name__', '')}."
        if module.startswith(_OUTSIDE):
            return None
        around = [loop for loop in _loops(frame.f_code) if frame.f_lasti in loop.instructions]
        if around and not module.startswith(_IN_STEP):
            return frame, min(around, key=lambda loop: len(loop.instructions))
        frame = frame.f_back
    return None


@functools.cache
def _loops(code: CodeType) -> tuple[_Loop, ...]:
    instructions = list(dis.get_instructions(code))
    lines = {}
    line = code.co_firstlineno
    starts = dict(dis.findlinestarts(code))
    for instruction in instructions:
        line = starts.get(instruction.offset) or line
        lines[instruction.offset] = line
    last_jump: dict[int, int] = {}
    for instruction in instructions:
        jumps = instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs
        if jumps and instruction.argval <= instruction.offset:
            last_jump[instruction.argval] = instruction.offset  # `continue` jumps to the same place
    loops = []
    for target, jump in last_jump.items():
        places = range(target, jump + 1)
        loops.append(_Loop(places, min(line for offset, line in lines.items() if offset in places)))
    return tuple(loops)
