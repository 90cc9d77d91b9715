"""Write the `.ipynb` beside each `examples/*.py`, without outputs; `--check` only says which ones differ.

The `.py` file (py:percent) is the source. A notebook is made from it alone, cell ids included, so that the same
source gives the same bytes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jupytext
import nbformat

__all__ = ["main", "render"]

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def render(source: Path) -> str:
    """Return the notebook of a py:percent file, as the text of its `.ipynb`."""
    notebook = jupytext.read(source)
    for number, cell in enumerate(notebook.cells, start=1):
        cell["id"] = f"cell-{number:02d}"
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    nbformat.validate(notebook)
    return f"{nbformat.writes(notebook).rstrip()}\n"


def main(argv: list[str] | None = None) -> int:
    """Pair every example; return 1 when `--check` finds one that differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a notebook is not up to date")
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
        print(f"notebooks without a .py source beside them: {', '.join(sorted(orphans))}", file=sys.stderr)
    if check and stale:
        print(f"not up to date with their .py: {', '.join(stale)}; `make notebooks` writes them", file=sys.stderr)
    return int(bool(orphans or (check and stale)))


if __name__ == "__main__":
    sys.exit(main())
