"""`x?` and whatever else IPython pages: on a rank it is shown, as there is no pager behind it.

`!command` on ranks: IPython takes an interrupt for the command's end and goes on; here it ends the cell, too.

`sys.exit()` and `exit()` in a cell: they end the cell on that rank, never the rank, and are told so.
"""

from __future__ import annotations

import contextlib
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any, TextIO

from IPython.display import display

from axon_nb.engine.kernel.interrupts import InterruptHandler
from axon_nb.engine.kernel.tracebacks import find_location

__all__ = ["describe_exit", "install_exits", "install_pager", "install_shell_commands", "redirect_pager"]

_CELLS_FILE = re.compile(r"^\S*File:\S*\s+\S*ipykernel_\d+/\S*\n?", re.MULTILINE)
"""The line that names the file of a cell: there is none, and its name is another on each rank."""

_streams: list[TextIO] = []


@contextlib.contextmanager
def redirect_pager(stream: TextIO) -> Iterator[None]:
    """What is paged meanwhile goes to `stream`."""
    _streams.append(stream)
    try:
        yield
    finally:
        _streams.remove(stream)


def install_pager(shell: Any) -> None:
    """Have `shell` display what it would page, as text: ranks that show the same share one."""

    def show(shell: Any, data: Any, start: int = 0, screen_lines: int = 0) -> None:
        text = data.get("text/plain", "") if isinstance(data, dict) else str(data)
        text = _CELLS_FILE.sub("", text).rstrip()
        if _streams:
            _streams[-1].write(f"{text}\n")
        else:
            display({"text/plain": text}, raw=True)

    shell.set_hook("show_in_pager", show, 0)


def install_shell_commands(shell: Any, interrupts: InterruptHandler) -> None:
    """Have `!command` and `lines = !command` raise the interrupts that they were ended by."""
    for name in ("system", "getoutput"):
        setattr(shell, name, _raising(getattr(shell, name), interrupts))


def _raising(run: Any, interrupts: InterruptHandler) -> Any:
    def command(*args: Any, **kwargs: Any) -> Any:
        before = interrupts.raised
        result = run(*args, **kwargs)
        if interrupts.raised > before:
            raise KeyboardInterrupt
        return result

    return command


_NOTE = "It ends the cell on this rank, and counts as a failure; the rank lives on with all it has."


def install_exits(shell: Any) -> None:
    """Have `exit()` and `quit()` do as `sys.exit()`: IPython's own end the process that runs the cell."""
    for name in ("exit", "quit"):
        shell.user_ns[name] = sys.exit
    warnings.filterwarnings("ignore", message="To exit: use 'exit', 'quit'", category=UserWarning)


def describe_exit(reply: dict[str, Any], shell: Any) -> None:
    """Say in the reply of a cell what `SystemExit` means here, in place of IPython's hint to `%tb`."""
    if reply.get("ename") != "SystemExit":
        return
    error = getattr(getattr(shell, "last_execution_result", None), "error_in_exec", None)
    line, _ = find_location(getattr(error, "__traceback__", None))
    code = getattr(error, "code", None)
    reply["evalue"] = "" if code is None else str(code)
    where = f" at line {line}" if line else ""
    reply["traceback"] = [f"SystemExit{where}: sys.exit({'' if code is None else repr(code)})", _NOTE]
