"""Write the editions of the course from `course/NN_name.py`; `--check` only lists what is out of date.

    python -m scripts.build_course                          # course/student/*.ipynb, and the packed solutions
    python -m scripts.build_course --edition solved DIR     # with the solutions, to run or to read
    python -m scripts.build_course --edition nbgrader DIR   # for a school's grader: its metadata and markers

A solution stands between the lines ``### BEGIN SOLUTION 2.2`` and ``### END SOLUTION``, and the student edition has a
line in its place that raises NotImplementedError; outside of functions, a name bound to `...`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import jupytext
from nbformat import NotebookNode

from axon_course.answers import FILE, pack
from axon_course.definitions import find_exercise
from scripts.pair_notebooks import render

SOURCES = Path(__file__).resolve().parent.parent / "course"
_REGION = re.compile(
    r"^(?P<indent> *)### BEGIN SOLUTION (?P<id>[0-9]+\.[0-9]+)\n(?P<body>.*?)^ *### END SOLUTION$",
    re.MULTILINE | re.DOTALL,
)
_MARKER = re.compile(r"^ *### (?:BEGIN SOLUTION [0-9.]+|END SOLUTION)\n?", re.MULTILINE)
_CHECK = re.compile(r'^check\("([0-9.]+)"\)$')


def stub(source: str) -> str:
    """Return a cell without its solution."""

    def replaced(region: re.Match[str]) -> str:
        if region["indent"]:
            return f"{region['indent']}raise NotImplementedError  # your lines"
        name = re.match(r"(\w+)\s*=", region["body"])
        return f"{name[1]} = ...  # your answer" if name else "# your lines"

    return _REGION.sub(replaced, source)


def without_markers(source: str) -> str:
    """Return a cell with its solution, as it runs."""
    return _MARKER.sub("", source)


def _student(notebook: NotebookNode) -> None:
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.source = stub(cell.source)


def _solved(notebook: NotebookNode) -> None:
    for cell in notebook.cells:
        cell.source = without_markers(cell.source)


def _nbgrader(notebook: NotebookNode) -> None:
    """Mark solutions and checks as nbgrader does: a check is a test, with a point for each property."""
    for cell in notebook.cells:
        found = _CHECK.match(cell.source.strip())
        region = _REGION.search(cell.source)
        if not found and not region:
            continue
        number = found[1] if found else region["id"] if region else ""
        cell.metadata["nbgrader"] = {
            "schema_version": 3,
            "grade_id": f"{'check' if found else 'answer'}-{number.replace('.', '-')}",
            "grade": bool(found),
            "solution": not found,
            "locked": bool(found),
            "task": False,
            **({"points": len(find_exercise(number).properties)} if found else {}),
        }
        cell.source = f'assert check("{number}").passed' if found else cell.source


EDITIONS: dict[str, Callable[[NotebookNode], None]] = {"nbgrader": _nbgrader, "solved": _solved, "student": _student}


def answers() -> dict[str, str]:
    """Return the packed solutions by exercise: each is the cell that holds it."""
    found = {}
    for source in sorted(SOURCES.glob("[0-9]*.py")):
        for cell in jupytext.read(source).cells:
            if region := _REGION.search(cell.source):
                found[region["id"]] = pack(without_markers(cell.source))
    return dict(sorted(found.items(), key=lambda item: [int(part) for part in item[0].split(".")]))


def main(argv: list[str] | None = None) -> int:
    """Write an edition; return 1 if `--check` finds a file out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is out of date")
    parser.add_argument("--edition", choices=list(EDITIONS), default="student")
    parser.add_argument("folder", nargs="?", type=Path, default=SOURCES / "student", metavar="DIR")
    options = parser.parse_args(argv)
    edit = EDITIONS[options.edition]
    texts = {
        options.folder / f"{source.stem}.ipynb": render(source, edit) for source in sorted(SOURCES.glob("[0-9]*.py"))
    }
    if options.edition == "student":
        texts[FILE] = json.dumps(answers(), indent=1) + "\n"
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    orphans = sorted({*options.folder.glob("*.ipynb")} - texts.keys())
    if options.check:
        if wrong := [path.name for path in (*stale, *orphans)]:
            print(f"out of date: {', '.join(wrong)}; run `make notebooks`", file=sys.stderr)
        return int(bool(wrong))
    options.folder.mkdir(parents=True, exist_ok=True)
    for path in stale:
        path.write_text(texts[path], encoding="utf-8")
    for path in orphans if options.edition == "student" else ():
        path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
