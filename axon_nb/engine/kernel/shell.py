"""Adapts IPython's shell commands and exits to ranks.

IPython swallows an interrupt
that stops a `!command`; here it also stops the cell. `sys.exit()` and `exit()` stop the cell on that rank, never the
rank, and a note says so.
"""

from __future__ import annotations

import builtins
import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

from IPython.core.compilerop import CachingCompiler

from axon_nb.engine.kernel.interrupts import InterruptHandler
from axon_nb.engine.kernel.tracebacks import find_location

_NOTE = "The cell stopped on this rank and counts as failed; the rank keeps running with its state."


def install_cell_names(shell: Any) -> None:
    """Have `shell` name the file of a cell as IPython does in a terminal, ``<ipython-input-3-9f2c61d0a1b4>``.

    Profilers and caches on disk know that name. It is the same on all ranks, so that equal warnings and tracebacks are
    shown once; ipykernel's contains the process id.
    """
    shell.compile.get_code_name = functools.partial(CachingCompiler.get_code_name, shell.compile)


def install_shell_commands(shell: Any, interrupts: InterruptHandler) -> None:
    """Have `!command` and `lines = !command` raise the interrupt that stopped them."""
    for name in ("system", "getoutput"):
        setattr(shell, name, _raise_interrupts(getattr(shell, name), interrupts))


def _raise_interrupts(run: Any, interrupts: InterruptHandler) -> Any:
    def command(*args: Any, **kwargs: Any) -> Any:
        before = interrupts.raised
        result = run(*args, **kwargs)
        if interrupts.raised > before:
            raise KeyboardInterrupt
        return result

    return command


def install_restored_names(shell: Any, predefine: Callable[[], None]) -> None:
    """Bring back what everything else needs: removed builtins after each cell, predefined names after `%reset`.

    Args:
        shell: The rank's shell.
        predefine: Puts the predefined names into its namespace.
    """
    run, reset = shell.run_code, shell.reset
    present, original = vars(builtins), list(vars(builtins).items())

    async def run_code(*args: Any, **kwargs: Any) -> Any:
        try:
            return await run(*args, **kwargs)
        finally:  # no builtin may be used before it is back
            for name, value in original:
                if name not in present:
                    present[name] = value

    def reset_namespace(*args: Any, **kwargs: Any) -> None:
        reset(*args, **kwargs)
        predefine()
        install_exits(shell)

    shell.run_code, shell.reset = run_code, reset_namespace


def install_autoreload(shell: Any) -> None:
    """Have `%autoreload` read new modules after each cell, so that it can update their classes when they are edited.

    It does so before each cell. In a notebook a cell that edits the file comes between; ranks do not run that.
    """

    def read_modules(*_: Any) -> None:
        if (magics := shell.magics_manager.registry.get("AutoreloadMagics")) is not None:
            magics.pre_run_cell(None)

    shell.events.register("post_run_cell", read_modules)


def install_exits(shell: Any) -> None:
    """Have `exit()` and `quit()` act like `sys.exit()`: IPython's own would stop the rank's process."""
    for name in ("exit", "quit"):
        shell.user_ns[name] = sys.exit
    warnings.filterwarnings("ignore", message="To exit: use 'exit', 'quit'", category=UserWarning)


def describe_exit(reply: dict[str, Any], shell: Any) -> None:
    """Explain a `SystemExit` that the cell itself raised, instead of IPython's hint to `%tb`."""
    error = getattr(getattr(shell, "last_execution_result", None), "error_in_exec", None)
    if reply.get("ename") != "SystemExit" or not isinstance(error, SystemExit):
        return
    line, _ = find_location(error.__traceback__)
    code = error.code
    reply["evalue"] = "" if code is None else str(code)
    where = f" at line {line}" if line else ""
    reply["traceback"] = [f"SystemExit{where}: sys.exit({'' if code is None else repr(code)})", _NOTE]
