"""Clean-up with ruff, if installed: sort imports, and silence the rules that the cells' own style breaks."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["apply_ruff"]

_FIXED = "I001,F401,RUF100"
_NEVER_SILENCED = {"F821", "invalid-syntax"}
"""Undefined names stay visible to the reader."""


def apply_ruff(text: str, target: Path) -> tuple[str, list[str]]:
    """Fix imports and add a `noqa` directive for the rules that the cells break, as configured for the script's folder.

    Args:
        text: The script.
        target: Its future path.

    Returns:
        The text and its undefined names; without ruff the unchanged text and no names.
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
    # Run in the script's folder, which determines the first-party modules.
    folder = path.parent if path.parent.is_dir() else None
    return subprocess.run(
        [*command, *options], input=text, cwd=folder, capture_output=True, text=True, check=False
    ).stdout
