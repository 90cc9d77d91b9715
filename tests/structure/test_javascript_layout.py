"""The JavaScript of the package: how long its files and functions are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.structure.test_layout import MAX_LINES
from tests.support.node import node

MAX_FUNCTION_LINES = 60


@pytest.fixture
def modules(root: Path) -> list[Path]:
    """All modules of the widgets and of the panel in JupyterLab."""
    return sorted((root / "axon_nb").rglob("static/**/*.js"))


def test_modules_are_short(modules: list[Path]) -> None:
    lengths = {path.as_posix(): len(path.read_text(encoding="utf-8").splitlines()) for path in modules}
    assert {path: lines for path, lines in lengths.items() if lines > MAX_LINES} == {}


def test_modules_are_checked_by_typescript(modules: list[Path]) -> None:
    assert [path for path in modules if not path.read_text(encoding="utf-8").startswith("// @ts-check\n")] == []


def test_functions_are_short(modules: list[Path], root: Path) -> None:
    if not (root / "node_modules" / "typescript").is_dir():
        pytest.skip("needs typescript: scripts/check_javascript installs it")
    functions = json.loads(node(str(root / "tests/js/functions.mjs"), *map(str, modules)))
    found = {(Path(path).name, name) for path, name, _, _ in functions}
    known = {("store.js", "merge"), ("view.js", "constructor"), ("view.js", "draw"), ("wire.js", "sendIfVisible")}
    assert known <= found
    long = [
        f"{Path(path).relative_to(root)}:{line} {name} has {lines} lines"
        for path, name, line, lines in functions
        if lines > MAX_FUNCTION_LINES
    ]
    assert long == [], f"at most {MAX_FUNCTION_LINES}: split them"
