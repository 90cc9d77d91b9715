"""What is mistyped gets one sentence that names the nearest that there is: for magics and for the command line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from axon_nb.errors import UsageError

__all__ = ["nearest_option", "unknown_command"]


def unknown_command(program: str, word: str, commands: Iterable[str]) -> UsageError:
    """The error of a sub-command that is not there: names the nearest, or all.

    Args:
        program: What takes the command, such as ``%distributed`` or ``axon-nb``.
        word: What was typed; empty: nothing.
        commands: Those there are.
    """
    names = list(commands)
    if not word:
        return UsageError(f"{program} takes a command: it is one of {', '.join(names)}.")
    close = difflib.get_close_matches(word, names, n=1)
    hint = f"did you mean `{program} {close[0]}`?" if close else f"it is one of {', '.join(names)}."
    return UsageError(f"{program} has no command {word!r}: {hint}")


def nearest_option(word: str, options: Sequence[str]) -> str:
    """How the sentence about an unknown option ends: the nearest, or all."""
    close = difflib.get_close_matches(word, options, n=1)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; it has {', '.join(options)}." if options else "; it takes no options."
