"""`tests/promises.toml` names a test for every promise to users, and `make test` runs them."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import axon_nb
from axon_nb.magics.arguments import EXAMPLES


@pytest.fixture(scope="module")
def promises(root: Path) -> dict[str, Any]:
    """The tests of each promise, by kind."""
    return tomllib.loads((root / "tests" / "promises.toml").read_text(encoding="utf-8"))


def test_every_row_of_the_readme_has_tests(promises: dict[str, Any], root: Path) -> None:
    readme = (root / "README.md").read_text(encoding="utf-8")
    _, _, section = readme.partition("## When something goes wrong")
    rows = re.findall(r"^\| (.+?) \| .+ \|$", section.partition("\n## ")[0], re.MULTILINE)
    assert rows[0] == "what happens in a cell"
    assert set(promises["failures"]) == set(rows[1:])


def test_every_command_has_tests(promises: dict[str, Any]) -> None:
    assert set(promises["commands"]) == set(EXAMPLES)


def test_every_public_name_has_tests(promises: dict[str, Any]) -> None:
    assert set(promises["names"]) == set(axon_nb.__all__) - {"__version__"}


def test_every_view_has_a_page_in_a_browser(promises: dict[str, Any], root: Path) -> None:
    static = root / "axon_nb" / "widgets" / "static"
    views = {path.parent.name for path in static.glob("*/view.js")} | {"memory"}
    assert views <= set(promises["views"])
    for tests in promises["views"].values():
        assert all(test.startswith("tests/browser/") for test in tests)


def test_named_tests_exist(promises: dict[str, Any], root: Path) -> None:
    wrong = []
    for tests in (tests for kind in promises.values() for tests in kind.values()):
        assert tests
        for test in tests:
            file, _, name = test.partition("::")
            tree = (
                ast.parse((root / file).read_text(encoding="utf-8")) if (root / file).exists() else ast.Module([], [])
            )
            names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
            if not tree.body or (name and name not in names):
                wrong.append(test)
    assert not wrong, "\n".join(wrong)
