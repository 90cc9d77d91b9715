"""The command line: parsers that raise, and suggestions for mistyped commands and options, for magics too."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from msgspec import Struct

from axon_nb.errors import UsageError


class CommandParser(argparse.ArgumentParser):
    """Raises UsageError with one sentence instead of printing usage and exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise the error; argparse calls this."""
        raise UsageError(f"{self.prog}: {message}; see `{self.prog} --help`.")

    def options(self) -> list[str]:
        """Return all option strings."""
        return [option for action in self._actions for option in action.option_strings]


class ProgramCommand(Struct, frozen=True):
    """A subcommand of `axon-nb`."""

    summary: str
    description: str
    add_arguments: Callable[[CommandParser], None]
    run: Callable[[argparse.Namespace], int]
    """Returns the exit status."""


def unknown_command(program: str, word: str, commands: Iterable[str]) -> UsageError:
    """Create the error for an unknown subcommand; it suggests the closest one, or says what lists all.

    Args:
        program: The program or magic, such as ``%distributed`` or ``axon-nb``.
        word: What the user typed; may be empty.
        commands: The existing subcommands.
    """
    names = list(commands)
    if not word:
        return UsageError(f"{program} needs a command: one of {', '.join(names)}.")
    close = difflib.get_close_matches(word, names, n=1)
    overview = "help" if program.startswith("%") else "--help"
    hint = f"did you mean `{program} {close[0]}`?" if close else f"`{program} {overview}` lists all."
    return UsageError(f"{program} has no command {word!r}: {hint}")


def nearest_option(word: str, options: Sequence[str]) -> str:
    """Return the end of a sentence about an unknown option: the closest option, or all."""
    close = difflib.get_close_matches(word, options, n=1)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; options are {', '.join(options)}." if options else "; it has no options."
