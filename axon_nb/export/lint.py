"""The script as ruff likes it, where that is installed: imports sorted, what the cells' own style breaks silenced."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["settled"]

_FIXED = "I001,F401,RUF100"
_NEVER_SILENCED = {"F821", "invalid-syntax"}
"""Names that nobody defines are the reader's business."""


def settled(text: str, target: Path) -> tuple[str, list[str]]:
    """The script with the directive that silences the rules which its cells break, as set for the script's folder.

    Args:
        text: The script.
        target: Where it will be.

    Returns:
        The text, and the names that it uses and nothing defines; without ruff the text as it was, and none.
    """
    ruff = _ruff()
    if ruff is None:
        return text, []
    fixed = _run([*ruff, "check", "--fix-only", f"--fixable={_FIXED}"], text, target) or text
    found = json.loads(_run([*ruff, "check", "--output-format=json"], fixed, target) or "[]")
    codes = {entry["code"] for entry in found if entry.get("code")}
    undefined = sorted(
        {entry["message"].partition("`")[2].partition("`")[0] for entry in found if entry["code"] == "F821"}
    )
    silenced = sorted(codes - _NEVER_SILENCED)
    if silenced:
        head, end, rest = fixed.partition('"""\n\n')
        fixed = f"{head}{end}# ruff: noqa: {', '.join(silenced)}\n{rest}"
    return fixed, undefined


def _ruff() -> list[str] | None:
    if importlib.util.find_spec("ruff") is not None:
        return [sys.executable, "-m", "ruff"]
    path = shutil.which("ruff")
    return [path] if path else None


def _run(command: list[str], text: str, target: Path) -> str:
    path = target.absolute()
    options = ["--no-cache", "--quiet", "--exit-zero", "--stdin-filename", str(path), "-"]
    # In the script's own folder: which modules are the project's own depends on it.
    folder = path.parent if path.parent.is_dir() else None
    return subprocess.run(
        [*command, *options], input=text, cwd=folder, capture_output=True, text=True, check=False
    ).stdout
