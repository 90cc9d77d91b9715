"""`%distributed run` and `import`: run a script on ranks, or cut it into cells."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from axon_nb.errors import UsageError
from axon_nb.magics.arguments import LineParser, command


def run_parser() -> LineParser:
    """Return the parser of `%distributed run`."""
    parser = LineParser("%distributed run", "Run a script on all ranks, as torchrun would; its variables stay.")
    parser.add_argument("file", metavar="FILE", help="such as train.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")
    return parser


def script_cell(line: str) -> str | None:
    """Return the cell that runs a script on a rank; print the help and return None if the line asks for it.

    Args:
        line: The words after `%distributed run`: the script and its arguments.

    Raises:
        UsageError: there is no such script.
    """
    try:
        name, *arguments = shlex.split(line) or ["--help"]
    except ValueError as error:
        raise UsageError(f"%distributed run: {error} in {line!r}.") from None
    if name in ("--help", "?", "??"):
        print(run_parser().help())
        return None
    path = Path(name).expanduser().absolute()
    if path.suffix != ".py":
        raise UsageError(f"%distributed run: {name!r} is not a Python script; its name must end in .py.")
    if not path.is_file():
        raise UsageError(f"%distributed run: {path} does not exist.")
    return f"%run {shlex.join([str(path), *arguments])}\n"


def import_parser() -> LineParser:
    """Return the parser of `%distributed import`."""
    parser = LineParser("%distributed import", "Cut a script for torchrun into the cells of a notebook.")
    parser.add_argument("script", metavar="SCRIPT", help="such as train.py")
    parser.add_argument("-o", "--out", metavar="NOTEBOOK", default=None, help="default: beside the script")
    parser.add_argument("--args", metavar="WORDS", default="", help="the script's arguments: --args='--epochs 3'")
    parser.add_argument("--force", action="store_true", help="overwrite the notebook")
    return parser


@command(import_parser)
def import_script(options: argparse.Namespace) -> None:
    """Cut a script into the cells of a notebook, and print a report.

    Args:
        options: The options of `%distributed import`.
    """
    from axon_nb import script

    out = Path(options.out).expanduser() if options.out else None
    print(script.import_script(Path(options.script).expanduser(), out, arguments=options.args, force=options.force))
