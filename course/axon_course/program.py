"""`axon-nb course`, which copies the notebooks into a folder, and `axon-nb class`, which shows how a class gets on."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping
from pathlib import Path

from axon_course.board import read_board
from axon_nb.errors import UsageError
from axon_nb.usage import CommandParser, ProgramCommand


def copy_course(folder: Path) -> str:
    """Copy the student edition into a folder, which is created; files that are there are kept.

    Returns:
        What was done, and how to start.

    Raises:
        UsageError: the folder cannot be written.
    """
    package = Path(__file__).parent
    shipped = package / "student"
    source = shipped if shipped.is_dir() else package.parent / "student"
    notebooks, changed = [], []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for original in sorted(source.glob("*.*")):
            copied = folder / original.name
            if not copied.exists():
                shutil.copyfile(original, copied)
            elif copied.read_bytes() != original.read_bytes():
                changed.append(copied)
            notebooks += [copied] if copied.suffix == ".ipynb" else []
    except OSError as error:
        raise UsageError(f"axon-nb course: cannot write to {folder} ({error.strerror}); name another folder.") from None
    kept = f"Changed, and kept as they are: {', '.join(path.name for path in changed)}.\n" if changed else ""
    return f"{kept}{len(notebooks)} notebooks are in {folder}. Start with `jupyter lab {notebooks[0]}`."


def _course_arguments(parser: CommandParser) -> None:
    default = Path("axon_nb_course")
    text = f"where to put it; default: {default}"
    parser.add_argument("folder", nargs="?", type=Path, default=default, metavar="DIR", help=text)


def _course(options: argparse.Namespace) -> int:
    print(copy_course(options.folder))
    return 0


def _class_arguments(parser: CommandParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder that AXON_NB_CLASS_DIR names for learners")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page instead, which reloads itself")


def _class(options: argparse.Namespace) -> int:
    board = read_board(options.folder)
    if options.html is None:
        print(board)
        return 0
    try:
        options.html.write_text(board.to_html(), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"axon-nb class: cannot write {options.html} ({error.strerror}); name another file.") from None
    print(f"{board.summary} The page is {options.html}.")
    return 0


COURSE_COMMANDS: Mapping[str, ProgramCommand] = {
    "class": ProgramCommand(
        "show how a class gets on with the course",
        "Show who has done which exercises, the most frequent mistakes, and all guesses, under nicknames. "
        "Example: axon-nb class /srv/class --html board.html",
        _class_arguments,
        _class,
    ),
    "course": ProgramCommand(
        "copy the notebooks of the course into a folder",
        "Copy the course into a folder. Notebooks that you have changed are kept. Example: axon-nb course learn",
        _course_arguments,
        _course,
    ),
}
