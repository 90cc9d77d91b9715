"""Lines of code by room, against their budgets: `python -m scripts.room_sizes`, with --update to set the budgets.

Counted are lines with code: no blank ones, comments or docstrings. A budget is raised in a commit that says for what.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

from scripts.generated_page import ROOT

BUDGETS = ROOT / "tests" / "structure" / "room_sizes.toml"
_HEAD = """\
# Lines of code by room, at most. `python -m scripts.room_sizes --update` sets them to what there is; a commit that
# raises one says for what.

"""
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}


def lines_of_code(source: str) -> int:
    """Count the lines of a module that hold code."""
    texts = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = {line for token in tokens if token.type not in _NO_CODE for line in range(token.start[0], token.end[0] + 1)}
    return len(code - texts)


def sizes(root: Path = ROOT) -> dict[str, int]:
    """The lines of code of each folder of the package and of `magics`, without those of folders within."""
    found: Counter[str] = Counter()
    for top in ("axon_nb", "magics"):
        for path in sorted((root / top).rglob("*.py")):
            if not path.parent.is_symlink():
                found[path.parent.relative_to(root).as_posix()] += lines_of_code(path.read_text(encoding="utf-8"))
    return {room: count for room, count in found.items() if count}


def main() -> int:
    """Print what differs from the budgets; return 1 if a room is above its own."""
    parser = argparse.ArgumentParser(prog="python -m scripts.room_sizes", description=__doc__)
    parser.add_argument("--update", action="store_true", help="set the budgets to what there is")
    now = sizes()
    if parser.parse_args().update:
        BUDGETS.write_text(_HEAD + "".join(f'"{room}" = {now[room]}\n' for room in sorted(now)), encoding="utf-8")
    budgets: dict[str, int] = tomllib.loads(BUDGETS.read_text(encoding="utf-8"))
    for room in sorted(now.keys() | budgets.keys()):
        if (change := now.get(room, 0) - budgets.get(room, 0)) != 0:
            print(f"{room}: {now.get(room, 0)} lines of code, {change:+}")
    print(f"{sum(now.values()):,} lines of code in {len(now)} rooms; budget {sum(budgets.values()):,}")
    above = [room for room, count in now.items() if count > budgets.get(room, 0)]
    if above:
        print(f"Above their budgets: {', '.join(above)}. Make it with fewer lines, or run --update and say for what.")
    return int(bool(above))


if __name__ == "__main__":
    sys.exit(main())
