"""Words a rank's death: its signal or exit code, the line of the cell it was at, and its last line of output."""

from __future__ import annotations

import re
import signal
from pathlib import PurePath

from axon_nb.records.protocol.cluster import ControllerExit, Exit

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.+)$')
_FATAL = "Fatal Python error: "
_STACK = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_DECORATORS = ("wrapper", "decorate_context", "inner", "_fn")
_MAX_LINE = 300
Frames = list[tuple[str, int, str]]
"""(file, line, function) of a thread's frames, innermost first."""
_OUT_OF_MEMORY = {True: ": out of memory", None: " (out of memory?)", False: ""}


def describe_death(event: Exit | ControllerExit) -> str:
    """Describe how a rank or the controller died; the text reads after its name.

    Args:
        event: The host agent's event.
    """
    if isinstance(event, Exit) and event.host_lost:
        return f"was lost with its host {event.host!r}: {event.host_lost}"
    code, output, crash = event.code, event.last_output, event.crash
    if code >= 0:
        text = f"exited with code {code}"
    else:
        name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
        text = f"was killed by {name}" + (_OUT_OF_MEMORY[event.out_of_memory] if name == "SIGKILL" else "")
    if isinstance(event, Exit) and event.host:
        text += f" on the host {event.host!r}"
    text += crash_location(crash or output)
    line = last_line(output)
    return f"{text}; last line: {line}" if line else text


def last_line(output: str) -> str:
    """Return the last line that is not blank; with a crash report of Python, the last one before the report."""
    before = output.rpartition(_FATAL)[0] if _FATAL in output else output
    lines = [line.strip() for line in before.splitlines()]
    written = [line for line in lines if line]
    return written[-1][:_MAX_LINE] if written else ""


def crash_location(report: str) -> str:
    """Describe where Python crashed: the line of the cell, the library calls there, and the thread if it was another.

    Examples: `` at line 3 (ctypes string_at)`` (first and last function of the library), or `` at line 3, in another
    thread (queue get)``. Empty if the report does not say.
    """
    stacks = _stacks(report.rpartition(_FATAL)[2] if _FATAL in report else "")
    for has_crashed, frames in stacks:
        # IPython's run_code calls the cell's own frame. That is the entry before it: the newest call comes first.
        at = next((i for i, (file, _, name) in enumerate(frames) if name == "run_code" and "IPython" in file), 0)
        if at:
            calls = _library_calls(frames[: at - 1])
            text = f" at line {frames[at - 1][1]}" + (f" ({' … '.join(calls)})" if calls else "")
            return text if has_crashed else text + _crashed_thread(stacks)
    return ""


def _crashed_thread(stacks: list[tuple[bool, Frames]]) -> str:
    """Describe the thread that crashed; it is not the one that runs the cell."""
    crashed = next((frames for has_crashed, frames in stacks if has_crashed), None)
    if crashed is None:
        return ", in a thread of C code"
    return ", in another thread" + (f" ({_function(crashed[0][0], crashed[0][2])})" if crashed else "")


def _library_calls(frames: Frames) -> list[str]:
    """Return the first library function that was called, and the last one if it is a different one."""
    inner = [(file, name) for file, _, name in reversed(frames)]
    calls = [_function(file, name) for file, name in inner if name not in _DECORATORS and _is_library(file)]
    return list(dict.fromkeys([*calls[:1], *calls[-1:]]))


def _stacks(report: str) -> list[tuple[bool, Frames]]:
    """Parse each Python thread's stack: whether it crashed, and its frames; the one that crashed comes first.

    Python marks no thread if the crash was in one that runs no Python.
    """
    stacks: list[tuple[bool, Frames]] = []
    for line in report.splitlines():
        frame = _FRAME.match(line)
        if _STACK.match(line):
            stacks.append((line.startswith("Current"), []))
        elif frame and stacks:
            stacks[-1][1].append((frame["file"], int(frame["line"]), frame["name"]))
    return sorted(stacks, key=lambda stack: not stack[0])


def _is_library(file: str) -> bool:
    return not file.startswith("<") and "/axon_nb/" not in file


def _function(file: str, name: str) -> str:
    path = PurePath(file)
    return f"{path.parent.name if path.stem == '__init__' else path.stem} {name}"
