"""Parsing what stands behind a magic, with errors that say what is possible."""

from __future__ import annotations

import argparse
import difflib
import shlex
from collections.abc import Sequence
from typing import Any, NoReturn

from axon_nb.errors import UsageError

__all__ = ["LineParser", "parse"]


class LineParser(argparse.ArgumentParser):
    """An argument parser that raises UsageError with one sentence, and never exits."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, add_help=False, allow_abbrev=False, exit_on_error=False)

    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting."""
        raise UsageError(f"{self.prog}: {message}.")

    def options(self) -> list[str]:
        """All options, long forms first."""
        return [option for action in self._actions for option in action.option_strings]


def parse(parser: LineParser, line: str | Sequence[str]) -> argparse.Namespace:
    """Parse a magic's line.

    Raises:
        UsageError: an unknown option, a missing or a wrong value; names the nearest option.
    """
    try:
        words = shlex.split(line) if isinstance(line, str) else list(line)
    except ValueError as error:
        raise UsageError(f"{parser.prog}: {error} in {line!r}.") from None
    try:
        values, unknown = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise UsageError(f"{parser.prog}: {_lower(error.argument_name)}{error.message}.") from None
    if unknown:
        raise UsageError(f"{parser.prog} has no {unknown[0]!r}{_nearest(unknown[0], parser.options())}.")
    return values


def _lower(name: Any) -> str:
    return f"{name}: " if name else ""


def _nearest(word: str, options: list[str]) -> str:
    close = difflib.get_close_matches(word, options, n=1)
    if close:
        return f"; did you mean {close[0]}?".rstrip("?") + "?"
    return f"; it has {', '.join(options)}" if options else "; it takes no options"
