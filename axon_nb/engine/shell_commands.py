"""`!command` on ranks: IPython takes an interrupt for the command's end and goes on; here it ends the cell, too."""

from __future__ import annotations

from typing import Any

from axon_nb.engine.interrupts import Interrupts

__all__ = ["install_shell_commands"]


def install_shell_commands(shell: Any, interrupts: Interrupts) -> None:
    """Have `!command` and `lines = !command` raise the interrupts that they were ended by."""
    for name in ("system", "getoutput"):
        setattr(shell, name, _raising(getattr(shell, name), interrupts))


def _raising(run: Any, interrupts: Interrupts) -> Any:
    def command(*args: Any, **kwargs: Any) -> Any:
        before = interrupts.raised
        result = run(*args, **kwargs)
        if interrupts.raised > before:
            raise KeyboardInterrupt
        return result

    return command
