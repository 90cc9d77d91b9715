"""How a rank's death reads: its signal or exit code, the cell's line where it was, and the last line it wrote."""

from __future__ import annotations

import re
import signal
from pathlib import PurePath

from axon_nb.records.protocol.agent import ControllerExit, Exit

__all__ = ["describe_death", "last_line", "place_of_crash"]

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.+)$')
_FATAL = "Fatal Python error: "
_STACK = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_DECORATORS = ("wrapper", "decorate_context", "inner", "_fn")
_MAX_LINE = 300
Frames = list[tuple[str, int, str]]
"""(file, line, function) of a thread's frames, the innermost first."""
_MEMORY = {True: ": out of memory", None: " (out of memory?)", False: ""}


def describe_death(event: Exit | ControllerExit) -> str:
    """What became of a rank or the controller; reads after its name.

    Args:
        event: The host agent's.
    """
    code, words, crash = event.code, event.last_output, event.crash
    if code >= 0:
        text = f"exited with code {code}"
    else:
        name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
        text = f"was killed by {name}" + (_MEMORY[event.out_of_memory] if name == "SIGKILL" else "")
    text += place_of_crash(crash or words)
    line = last_line(words)
    return f"{text}; last line: {line}" if line else text


def last_line(words: str) -> str:
    """The last line that says something: before Python's own report of a crash, where there is one."""
    before = words.rpartition(_FATAL)[0] if _FATAL in words else words
    lines = [line.strip() for line in before.splitlines()]
    said = [line for line in lines if line]
    return said[-1][:_MAX_LINE] if said else ""


def place_of_crash(report: str) -> str:
    """The cell's line, what of a library it had called there, and which thread has crashed if it was another.

    Such as `` at line 3 (ctypes string_at)``, the library's first function and last, or `` at line 3, in another thread
    (queue get)``; may be empty.
    """
    stacks = _stacks(report.rpartition(_FATAL)[2] if _FATAL in report else "")
    for of_crash, frames in stacks:
        # IPython's run_code runs the cell's own frame: the line before it, as the newest call comes first.
        at = next((i for i, (file, _, name) in enumerate(frames) if name == "run_code" and "IPython" in file), 0)
        if at:
            called = _called(frames[: at - 1])
            text = f" at line {frames[at - 1][1]}" + (f" ({' … '.join(called)})" if called else "")
            return text if of_crash else text + _elsewhere(stacks)
    return ""


def _elsewhere(stacks: list[tuple[bool, Frames]]) -> str:
    """Which thread has crashed, when it is not the one that runs the cell."""
    crashed = next((frames for of_crash, frames in stacks if of_crash), None)
    if crashed is None:
        return ", in a thread of C code"
    return ", in another thread" + (f" ({_function(crashed[0][0], crashed[0][2])})" if crashed else "")


def _called(frames: Frames) -> list[str]:
    """The first function of a library that was called, and the last when it is another."""
    inner = [(file, name) for file, _, name in reversed(frames)]
    called = [_function(file, name) for file, name in inner if name not in _DECORATORS and _library(file)]
    return list(dict.fromkeys([*called[:1], *called[-1:]]))


def _stacks(report: str) -> list[tuple[bool, Frames]]:
    """Each thread of Python's: whether it has crashed, and its frames; the one that has comes first.

    Python marks none when a thread has crashed in which no Python runs.
    """
    stacks: list[tuple[bool, Frames]] = []
    for line in report.splitlines():
        frame = _FRAME.match(line)
        if _STACK.match(line):
            stacks.append((line.startswith("Current"), []))
        elif frame and stacks:
            stacks[-1][1].append((frame["file"], int(frame["line"]), frame["name"]))
    return sorted(stacks, key=lambda stack: not stack[0])


def _library(file: str) -> bool:
    return "ipykernel_" not in file and not file.startswith("<") and "/axon_nb/" not in file


def _function(file: str, name: str) -> str:
    path = PurePath(file)
    return f"{path.parent.name if path.stem == '__init__' else path.stem} {name}"
