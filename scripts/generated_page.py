"""The frame of scripts that generate a page of docs/: run each as `python -m scripts.NAME`.

`--check` writes nothing and fails if the page is out of date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The folder of the project."""


def write_or_check(page: Path, render: Callable[[], str], description: str | None, argv: Sequence[str] | None) -> int:
    """Write the page, or check it if `argv` says so.

    Args:
        page: The file that is generated.
        render: Makes its content.
        description: What ``--help`` says.
        argv: Arguments of the command; None for those of this process.

    Returns:
        The exit status: 1 if ``--check`` finds the page out of date, else 0.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is out of date")
    options, text = parser.parse_args(argv), render()
    if not options.check:
        page.write_text(text, encoding="utf-8")
    elif not page.exists() or page.read_text(encoding="utf-8") != text:
        print(f"{page.relative_to(ROOT)} is out of date; run `make fix`", file=sys.stderr)
        return 1
    return 0
