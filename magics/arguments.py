"""Parses the arguments of magics, with errors that suggest a fix; holds the examples that their help shows."""

from __future__ import annotations

import argparse
import functools
import re
import shlex
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from axon_nb.errors import UsageError
from axon_nb.records.commands import COMMANDS
from axon_nb.usage import CommandParser, nearest_option

EXAMPLES = {
    "%%distributed": "%%distributed --ranks 0-1 --time    and below it: dist.all_reduce(torch.ones(8))",
    "%%plan": "%%plan -n 64 --card h100             and below it: the code that trains",
    "%%rank": "%%rank 0                             and below it: print(model)",
    "%gather": "%gather predictions --as everyone    joins the parts that %scatter made",
    "%inside": "%inside seen                         after a cell with `inside.record(...) as seen`",
    "%memory": "%memory model optimizer              without names: everything that the ranks' variables hold",
    "%pull": "%pull losses --ranks 0               fetches the value of rank 0; without --ranks a dict of all",
    "%push": "%push images labels                  sends the notebook's variables to all ranks",
    "%scatter": "%scatter images labels               sends each rank its part",
    "%shards": "%shards model optimizer --gradients",
    "%timeline": "%timeline --save trace.json          for Perfetto; without --save: a live view",
    "%watch": "%watch                               before the cell that trains",
    "attach": "%distributed attach                  after a kernel restart",
    "auto": "%distributed auto on                 undo it with `%distributed auto off`",
    "cancel": "%distributed cancel                  interrupts a cell that was started with --noblock",
    "config": "%distributed config keep_alive=10min  without key=value: shows all settings",
    "debug": "%distributed debug --ranks 2         after a cell failed on rank 2; `p loss` shows a variable",
    "doctor": "%distributed doctor                  attach its output to bug reports",
    "export": "%distributed export train.py         writes the cells that ran as a script for torchrun",
    "import": "%distributed import train.py         writes train.ipynb; `axon-nb import` does the same",
    "load": "%distributed load run7              on as many ranks: everything; on others: models and optimizers",
    "pause": "%distributed pause                   gives back what the ranks' GPUs keep for later",
    "resize": "%distributed resize 4                grows or shrinks the world to 4 ranks; training goes on",
    "restart": "%distributed restart                 starts as many new ranks as before",
    "run": "%distributed run train.py --epochs 3   shows its ranks in all views, and keeps its variables",
    "save": "%distributed save run7              writes the state of all ranks to the folder run7",
    "seed": "%distributed seed 0 --per-rank       seed 0 on rank 0, 1 on rank 1, and so on",
    "slow": "%distributed slow --ranks 2 --factor 2  rank 2 computes half as fast, until `%distributed slow off`",
    "start": "%distributed start -n 4 --backend gloo",
    "stop": "%distributed stop                    stops all ranks; nothing is left behind",
    "sync": "%distributed sync model optimizer    copies them from rank 0 to all ranks",
    "undo": "%distributed undo 2                  takes back the last two cells, on all their ranks",
} | {
    name: f"{f'%distributed {name} {words}'.rstrip():<36} {effect}"
    for name, (words, _, effect) in (
        (name, one.example.partition("  ")) for name, one in COMMANDS.items() if one.in_notebook
    )
}
_HELP = ("--help", "?", "??")
_WORD = re.compile(r"""(?:[^\s"']|"(?:\\.|[^"\\])*"|'[^']*')+""")
_EXPRESSION = re.compile(r"[^\W\d][\w.]*[\[(]")
"""The beginning of a word such as ``losses["val"]``, in which quotes are part of Python."""


def example_of(prog: str) -> str:
    """Return the help's example for a magic or a command such as ``%distributed start``; empty if there is none."""
    example = EXAMPLES.get(prog.removeprefix("%distributed "))
    return f"\n\nexample:\n  {example}" if example else ""


class LineParser(CommandParser):
    """An argument parser that raises UsageError with one sentence instead of exiting.

    Args:
        prog: The magic, or the command such as ``%distributed start``.
        description: A sentence.
        argument: The names of its only argument, as for `add_argument`; empty: others are added.
        **options: Those of that argument.
    """

    def __init__(self, prog: str, description: str, *argument: str, **options: Any) -> None:
        super().__init__(prog=prog, description=description, add_help=False, allow_abbrev=False, exit_on_error=False)
        if argument:
            self.add_argument(*argument, **options)

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(f"{self.prog}: {message}.")

    def help(self) -> str:
        """Return the help with an example."""
        return self.format_help().rstrip() + example_of(self.prog)


def command(parser: Callable[[], LineParser]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a line magic or a subcommand: it takes its parsed options, and its line may ask for its help.

    Args:
        parser: Makes the parser of its line; kept as the attribute ``parser``.
    """

    def decorate(run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def run_line(*arguments: Any) -> Any:
            *instance, line = arguments
            options = parse(parser(), line)
            return None if options is None else run(*instance, options)

        return raw_command(parser)(run_line)

    return decorate


def raw_command(parser: Callable[[], LineParser]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a subcommand that reads its line by itself, because parts of it belong to a script.

    Args:
        parser: Makes the parser that describes it; kept as the attribute ``parser``.
    """

    def decorate(run: Callable[..., Any]) -> Callable[..., Any]:
        vars(run)["parser"] = parser
        return run

    return decorate


def parse(parser: LineParser, line: str | Sequence[str]) -> argparse.Namespace | None:
    """Parse a magic's line; print its help and return None if the line ends with ``--help`` or ``?``.

    Raises:
        UsageError: an option is unknown, or a value is missing or invalid; suggests the nearest option.
    """
    try:
        words = _split(line) if isinstance(line, str) else list(line)
    except ValueError as error:
        raise UsageError(f"{parser.prog}: {error} in {line!r}.") from None
    if words and words[-1] in _HELP:
        print(parser.help())
        return None
    try:
        values, unknown = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        name = f"{error.argument_name}: " if error.argument_name else ""
        raise UsageError(f"{parser.prog}: {name}{error.message}.") from None
    if unknown:
        raise UsageError(f"{parser.prog} has no {unknown[0]!r}{nearest_option(unknown[0], parser.options())}")
    return values


def _split(line: str) -> list[str]:
    """Split a line as a shell does, but leave the quotes in expressions."""
    words, as_written = shlex.split(line), _WORD.findall(line)
    if len(words) != len(as_written):
        return words
    return [text if _EXPRESSION.match(text) else word for word, text in zip(words, as_written, strict=True)]
