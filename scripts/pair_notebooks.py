"""Write the `.ipynb` for each `examples/*.py`, without outputs; `--check` only lists those out of date.

The `.py` file (py:percent) is the source. A notebook is made from it alone, cell ids included, so that the same
source gives the same bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import jupytext
import nbformat
from nbformat import NotebookNode

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def render(source: Path, edit: Callable[[NotebookNode], None] | None = None) -> str:
    """Render a py:percent file as `.ipynb` text; `edit` may change the notebook before."""
    notebook = jupytext.read(source)
    if edit is not None:
        edit(notebook)
    for number, cell in enumerate(notebook.cells, start=1):
        cell["id"] = f"cell-{number:02d}"
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    nbformat.validate(notebook)
    return f"{nbformat.writes(notebook).rstrip()}\n"


def main(argv: list[str] | None = None) -> int:
    """Pair every example; return 1 if `--check` finds one out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a notebook is out of date")
    check = parser.parse_args(argv).check
    stale = []
    for source in sorted(EXAMPLES.glob("[0-9]*.py")):
        target = source.with_suffix(".ipynb")
        text = render(source)
        if target.exists() and target.read_text(encoding="utf-8") == text:
            continue
        stale.append(target.name)
        if not check:
            target.write_text(text, encoding="utf-8")
    orphans = [path.name for path in EXAMPLES.glob("*.ipynb") if not path.with_suffix(".py").exists()]
    if orphans:
        print(f"notebooks without a .py source: {', '.join(sorted(orphans))}", file=sys.stderr)
    if check and stale:
        print(f"out of date: {', '.join(stale)}; run `make notebooks`", file=sys.stderr)
    return int(bool(orphans or (check and stale)))


if __name__ == "__main__":
    sys.exit(main())
