"""Parsing what stands behind a magic, with errors that say what is possible.

An example of each magic and of each sub-command of `%distributed`, shown by its help.
"""

from __future__ import annotations

import argparse
import functools
import shlex
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from axon_nb.errors import UsageError
from axon_nb.usage import nearest_option, unknown_command

__all__ = ["EXAMPLES", "HelpAsked", "LineParser", "example_of", "parse", "telling_help", "unknown_command"]

EXAMPLES = {
    "%%distributed": "%%distributed --ranks 0-1 --time    and below it: dist.all_reduce(torch.ones(8))",
    "%%rank": "%%rank 0                             and below it: print(model)",
    "%gather": "%gather predictions --as everyone    what %scatter dealt out comes together again",
    "%memory": "%memory model optimizer              or without names: all that the ranks' variables hold",
    "%pull": "%pull losses --ranks 0               binds what rank 0 has; of all ranks a dict without --ranks",
    "%push": "%push images labels                  all ranks get those of the notebook",
    "%scatter": "%scatter images labels               each rank gets its part",
    "%shards": "%shards model optimizer --gradients",
    "%timeline": "%timeline --save trace.json          for Perfetto; or %timeline alone: a live view",
    "%watch": "%watch                               before the cell that trains",
    "attach": "%distributed attach                  after the kernel was restarted",
    "auto": "%distributed auto on                 and `%distributed auto off`",
    "cancel": "%distributed cancel                  ends a cell that was started with --noblock",
    "config": "%distributed config keep_alive=10min  or without key=value: shows all settings",
    "debug": "%distributed debug --ranks 2         after a cell has failed on rank 2; `p loss` shows a variable",
    "diff": "%distributed diff model --from 0     where other ranks' model is not as that of rank 0",
    "doctor": "%distributed doctor               what to send along with an issue",
    "export": "%distributed export train.py         the cells that ran, as a script for torchrun",
    "repair": "%distributed repair --from 0         a dead rank comes back with what rank 0 has",
    "restart": "%distributed restart                 all ranks anew, as many as before",
    "seed": "%distributed seed 0 --per-rank       seed 0 on rank 0, 1 on rank 1 and so on",
    "stacks": "%distributed stacks --ranks 1        where rank 1 is, also while it is stuck",
    "start": "%distributed start -n 4 --backend gloo",
    "status": "%distributed status                  a row for each rank",
    "stop": "%distributed stop                    ends all ranks; nothing is left behind",
    "sync": "%distributed sync model optimizer    all ranks get those of rank 0",
    "vars": "%distributed vars                    a row for each variable of the ranks",
}


def example_of(prog: str) -> str:
    """What help shows of a magic, or of a command such as ``%distributed start``; empty: nothing."""
    example = EXAMPLES.get(prog.removeprefix("%distributed "))
    return f"\n\nexample:\n  {example}" if example else ""


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
