"""Scripts and styles of the views. Each is one text in the page: what several share is put in where it is imported."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["STATIC", "script", "style"]

STATIC = Path(__file__).parent / "static"
"""Where scripts and styles are."""
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./(\w+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=function|const)", re.MULTILINE)
_SHARED = "common"


def script(name: str) -> str:
    """The script of a view, a module that imports nothing: anywidget gives the page one text, not a folder."""
    return _whole(name, set())


def style(name: str) -> str:
    """The style of a view, after what all have in common."""
    return f"{_read(f'{_SHARED}.css')}{_read(f'{name}.css')}"


def _whole(name: str, known: set[str]) -> str:
    def imported(found: re.Match[str]) -> str:
        if found[1] in known:
            return ""
        known.add(found[1])
        return _EXPORT.sub("", _whole(found[1], known))

    return _IMPORT.sub(imported, _read(f"{name}.js"))


def _read(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")
