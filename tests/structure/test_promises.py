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


def test_every_row_of_what_survives_has_tests(promises: dict[str, Any], root: Path) -> None:
    page = (root / "docs" / "failures.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| .+ \|$", page, re.MULTILINE)
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
    named = [test for kind in promises.values() for tests in kind.values() for test in tests]
    wrong = [test for test in named if not _functions(root, test)]
    assert not wrong, "\n".join(wrong)


def test_every_promise_has_a_test_that_is_not_slow(promises: dict[str, Any], root: Path) -> None:
    unproven = [
        f"{kind}: {promise}"
        for kind, named in promises.items()
        for promise, tests in named.items()
        if all("slow" in marks for test in tests for marks in _functions(root, test).values())
    ]
    assert not unproven, "only `make soak` runs the tests of:\n" + "\n".join(unproven)


@pytest.mark.parametrize(
    ("code", "slow"),
    [
        ("def test_it(): pass", False),
        ("@pytest.mark.slow\ndef test_it(): pass", True),
        ("@pytest.mark.slow()\n@pytest.mark.timeout(600)\nasync def test_it(): pass", True),
        ("pytestmark = pytest.mark.slow\ndef test_it(): pass", True),
        ("pytestmark = [pytest.mark.browser, pytest.mark.slow]\ndef test_it(): pass", True),
        ("pytestmark = [pytest.mark.browser]\n@pytest.mark.slow\ndef test_other(): pass\ndef test_it(): pass", False),
        ("@pytest.mark.parametrize('x', [pytest.param(1, marks=pytest.mark.slow), 2])\ndef test_it(x): pass", False),
    ],
)
def test_marks_of_functions_and_modules_are_detected(tmp_path: Path, code: str, slow: bool) -> None:
    (tmp_path / "test_file.py").write_text(code)
    assert ("slow" in _functions(tmp_path, "test_file.py::test_it")["test_it"]) == slow


def _functions(root: Path, test: str) -> dict[str, set[str]]:
    """The marks of the tests that an entry names, by function; those of its file included."""
    file, _, name = test.partition("[")[0].partition("::")
    if not (root / file).exists():
        return {}
    body = ast.parse((root / file).read_text(encoding="utf-8")).body
    assigned = [
        node.value for node in body if isinstance(node, ast.Assign) and "pytestmark" in map(ast.unparse, node.targets)
    ]
    of_file = [mark for value in assigned for mark in (value.elts if isinstance(value, ast.List) else [value])]
    return {
        node.name: {_mark(mark) for mark in [*of_file, *node.decorator_list]}
        for node in body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if node.name == name or (not name and node.name.startswith("test_"))
    }


def _mark(node: ast.expr) -> str:
    return ast.unparse(node.func if isinstance(node, ast.Call) else node).removeprefix("pytest.mark.")
