"""Parsing what stands behind a magic, with errors that say what is possible."""

from __future__ import annotations

import argparse
import functools
import shlex
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from axon_nb.errors import UsageError
from axon_nb.magics.examples import example_of
from axon_nb.usage import nearest_option, unknown_command

__all__ = ["HelpAsked", "LineParser", "parse", "telling_help", "unknown_command"]

_HELP = ("--help", "?", "??")


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


class HelpAsked(UsageError):
    """Help was asked for instead of anything being done; shows it."""

    def __init__(self, parser: LineParser) -> None:
        super().__init__(parser.format_help().rstrip() + example_of(parser.prog))
        self.parser = parser

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


def telling_help(magic: Callable[[str], Any]) -> Callable[[str], Any]:
    """A line magic that prints its help when it is asked for, which is no failure of the cell."""

    @functools.wraps(magic)
    def told(line: str) -> Any:
        try:
            return magic(line)
        except HelpAsked as asked:
            print(asked)
            return None

    return told


def parse(parser: LineParser, line: str | Sequence[str]) -> argparse.Namespace:
    """Parse a magic's line.

    Raises:
        HelpAsked: the line ends with ``--help`` or ``?``.
        UsageError: an unknown option, a missing or a wrong value; names the nearest option.
    """
    try:
        words = shlex.split(line) if isinstance(line, str) else list(line)
    except ValueError as error:
        raise UsageError(f"{parser.prog}: {error} in {line!r}.") from None
    if words and words[-1] in _HELP:
        raise HelpAsked(parser)
    try:
        values, unknown = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise UsageError(f"{parser.prog}: {_lower(error.argument_name)}{error.message}.") from None
    if unknown:
        raise UsageError(f"{parser.prog} has no {unknown[0]!r}{nearest_option(unknown[0], parser.options())}")
    return values


def _lower(name: Any) -> str:
    return f"{name}: " if name else ""
