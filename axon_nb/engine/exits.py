"""`sys.exit()` and `exit()` in a cell: they end the cell on that rank, never the rank, and are told so."""

from __future__ import annotations

import sys
import warnings
from typing import Any

from axon_nb.engine.short_traceback import find_place

__all__ = ["install_exits", "tell_exit"]

_NOTE = "It ends the cell on this rank, and counts as a failure; the rank lives on with all it has."


def install_exits(shell: Any) -> None:
    """Have `exit()` and `quit()` do as `sys.exit()`: IPython's own end the process that runs the cell."""
    for name in ("exit", "quit"):
        shell.user_ns[name] = sys.exit
    warnings.filterwarnings("ignore", message="To exit: use 'exit', 'quit'", category=UserWarning)


def tell_exit(reply: dict[str, Any], shell: Any) -> None:
    """Say in the reply of a cell what `SystemExit` means here, in place of IPython's hint to `%tb`."""
    if reply.get("ename") != "SystemExit":
        return
    error = getattr(getattr(shell, "last_execution_result", None), "error_in_exec", None)
    line, _ = find_place(getattr(error, "__traceback__", None))
    code = getattr(error, "code", None)
    reply["evalue"] = "" if code is None else str(code)
    where = f" at line {line}" if line else ""
    reply["traceback"] = [f"SystemExit{where}: sys.exit({'' if code is None else repr(code)})", _NOTE]
