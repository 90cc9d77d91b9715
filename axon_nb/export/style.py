"""Formats cells' code for a script without changing its meaning; ruff, if installed, also sorts imports."""

from __future__ import annotations

import ast
import importlib.util
import io
import json
import shutil
import subprocess
import sys
import tokenize
from pathlib import Path

_FIXED = "I001,F401,RUF100"
_NEVER_SILENCED = {"F821", "invalid-syntax"}
"""Undefined names stay visible to the reader."""


def indent_code(code: str, by: str = "    ") -> str:
    """Indent code by one level, except lines within strings."""
    within = lines_in_strings(code)
    lines = code.splitlines(keepends=True)
    return "".join(
        line if number in within or not line.strip() else by + line for number, line in enumerate(lines, start=1)
    )


def lines_in_strings(code: str) -> set[int]:
    """Return the numbers of lines that begin within a string, from 1."""
    numbers, opened = set[int](), list[int]()
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "STRING":
            numbers |= set(range(token.start[0] + 1, token.end[0] + 1))
        elif kind in ("FSTRING_START", "TSTRING_START"):  # Python 3.12 and newer
            opened.append(token.start[0])
        elif kind in ("FSTRING_END", "TSTRING_END"):
            numbers |= set(range(opened.pop() + 1, token.end[0] + 1))
    return numbers


def comment_out(code: str) -> str:
    """Turn code into comments."""
    return "".join(f"# {line}".rstrip() + "\n" for line in code.strip("\n").splitlines())


def one_statement_per_line(code: str, tree: ast.Module) -> str:
    """Put each top-level statement on its own lines, and expand blocks written on one line."""
    lines, pieces, done = code.splitlines(), list[str](), 0
    groups: list[list[ast.stmt]] = []
    for statement in tree.body:
        if groups and statement.lineno <= (groups[-1][-1].end_lineno or 0):
            groups[-1].append(statement)
        else:
            groups.append([statement])
    for group in groups:
        start, end = _first_line(group[0]), group[-1].end_lineno or group[-1].lineno
        pieces += lines[done : start - 1]
        crowded = len(group) > 1 or _has_semicolon(group[0], lines) or any(map(_has_compact_block, ast.walk(group[0])))
        pieces += [ast.unparse(statement) for statement in group] if crowded else lines[start - 1 : end]
        done = end
    pieces += lines[done:]
    return "\n".join(pieces).rstrip() + "\n"


def _first_line(statement: ast.stmt) -> int:
    decorators = getattr(statement, "decorator_list", [])
    return min(statement.lineno, *(int(decorator.lineno) for decorator in decorators), statement.lineno)


def _has_semicolon(statement: ast.stmt, lines: list[str]) -> bool:
    text = "\n".join(lines[statement.lineno - 1 : statement.end_lineno])
    try:
        return any(token.string == ";" for token in tokenize.generate_tokens(io.StringIO(text).readline))
    except (tokenize.TokenError, IndentationError):
        return False


def _has_compact_block(node: ast.AST) -> bool:
    """Whether a block is on the line of its header, or has two statements on one line."""
    for block in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
        if not isinstance(block, list) or not block or not isinstance(block[0], ast.stmt):
            continue
        lines = [statement.lineno for statement in block]
        if len(set(lines)) < len(lines) or (isinstance(node, ast.stmt) and lines[0] == _header_end(node)):
            return True
    return False


def _header_end(node: ast.stmt) -> int:
    """Last line of a compound statement's header."""
    parts = [part for name in ("test", "iter", "items", "args", "returns", "bases") for part in _listed(node, name)]
    return max([node.lineno, *(getattr(part, "end_lineno", None) or 0 for part in parts)])


def _listed(node: ast.AST, name: str) -> list[ast.AST]:
    value = getattr(node, name, None)
    return [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, ast.AST)]


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
    findings = json.loads(_run([*ruff, "check", "--output-format=json"], fixed, target) or "[]")
    codes = {entry["code"] for entry in findings if entry.get("code")}
    undefined = sorted(
        {entry["message"].partition("`")[2].partition("`")[0] for entry in findings if entry["code"] == "F821"}
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
