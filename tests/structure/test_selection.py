"""Which tests run: a real path for each promise, what a change selects, and the tables of their durations."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import axon_nb
from axon_nb.magics.arguments import EXAMPLES
from scripts import changed_tests
from scripts.changed_tests import DURATIONS, ROOT, TESTS, TURNS, affordable, runs_always, select, turn_of
from scripts.test_tables import PAGE, by_folder, read_durations, replace_table, updated

FAILURES = "tests/kernel/failures"

LOG = """
============ slowest durations ============
12.50s call     tests/kernel/test_a.py::test_one[x-1 of 2]
2.25s setup    tests/kernel/test_a.py::test_one[x-1 of 2]
0.25s teardown tests/kernel/test_a.py::test_one[x-1 of 2]
3.00s call     tests/unit/cluster/test_b.py::test_two
0.50s call     tests/kernel/test_a.py::test_three

(9 durations < 0.005s hidden.)
============ 3 passed in 20.00s ============
"""


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


def test_every_package_has_a_row_and_every_row_names_tests_that_exist() -> None:
    packages = {
        f"axon_nb/{folder.name}/" for folder in (ROOT / "axon_nb").iterdir() if (folder / "__init__.py").exists()
    }
    assert packages <= TESTS.keys()
    assert [path for tests in TESTS.values() for path in tests if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    ("changed", "selected"),
    [
        (["README.md", "docs/design/rooms.md"], []),
        ([".ci/landed", "tests/durations.json", "tests/promises.toml"], []),
        (
            ["axon_nb/plan/skeleton.py"],
            ["tests/kernel/views/test_what_if.py", "tests/plan"],
        ),
        (["axon_nb/plan/skeleton.py", "magics/pull.py"], ["tests/front_ends", "tests/kernel", "tests/plan"]),
        (["pyproject.toml", "axon_nb/host/children.py"], ["tests"]),
        (["tests/host/test_resources.py"], ["tests/host/test_resources.py"]),
        (["tests/host/conftest.py"], ["tests/host"]),
        (
            ["tests/kernel/recovery/trained_model.py"],
            ["tests/kernel/recovery/test_interrupts.py", "tests/kernel/recovery/test_recovery.py"],
        ),
    ],
)
def test_change_selects_the_tests_that_run_it(changed: list[str], selected: list[str]) -> None:
    assert select(changed) == selected


def test_changed_tests_and_short_ones_come_first() -> None:
    seconds = json.loads(DURATIONS.read_text(encoding="utf-8"))
    files = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / FAILURES).glob("test_*.py"))
    longest = max(files, key=lambda file: seconds.get(file, 1.0))
    taken, left_out = affordable([FAILURES], [longest], seconds.get(longest, 1.0) + 0.01)
    assert taken == [longest]
    assert sorted(taken + left_out) == files
    taken, left_out = affordable([FAILURES], [], float("inf"))
    assert sorted(taken) == files
    assert left_out == []


def test_tests_that_share_words_with_a_change_come_before_shorter_ones() -> None:
    taken, _ = affordable([FAILURES], ["axon_nb/host/deaths.py"], float("inf"))
    assert taken[0] == f"{FAILURES}/test_deaths.py"


def test_quick_tests_and_those_with_a_turn_take_nothing_from_the_change() -> None:
    turn = turn_of(0)
    taken, left_out = affordable(["tests"], [], float("inf"), turn)
    assert left_out == []
    assert not [name for name in taken if runs_always(name) or name in turn]


def test_turn_takes_half_of_the_time_at_most() -> None:
    seconds = json.loads(DURATIONS.read_text(encoding="utf-8"))
    everything = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    longest = max(everything, key=lambda file: seconds.get(file, 0.0))
    taken, left_out = affordable([longest], [], 2 * seconds[longest], set(everything) - {longest})
    assert (taken, left_out) == ([longest], [])


def test_each_file_has_one_turn() -> None:
    turns = Counter(file for landing in range(TURNS) for file in turn_of(landing + 100))
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    assert turns == dict.fromkeys((file for file in files if not runs_always(file)), 1)


def test_landings_are_counted_along_the_commits_that_they_name(tmp_path: Path) -> None:
    def git(*command: str) -> str:
        who = ["-c", "user.name=somebody", "-c", "user.email=somebody@localhost"]
        done = subprocess.run(["git", *who, *command], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    (tmp_path / "scripts").mkdir()
    (tmp_path / ".ci").mkdir()
    shutil.copy(changed_tests.__file__, tmp_path / "scripts")
    git("init", "--quiet")
    landed = "0" * 40  # of a history that this repository lacks
    counts = []
    for _ in range(3):
        (tmp_path / ".ci" / "landed").write_text(f"{landed}\n")
        show = "from scripts.changed_tests import landings; print(landings())"
        counts.append(subprocess.check_output([sys.executable, "-c", show], cwd=tmp_path, text=True).strip())
        git("add", ".ci")
        git("commit", "--quiet", "--message", "Land")
        git("commit", "--quiet", "--message", "Go on", "--allow-empty")
        landed = git("rev-parse", "HEAD")
    assert counts == ["1", "2", "3"]


def test_durations_are_summed_by_test_and_folder() -> None:
    seconds = read_durations(LOG)
    assert seconds["tests/kernel/test_a.py::test_one[x-1 of 2]"] == 15
    assert by_folder(seconds) == {"kernel": (2, 15.5), "unit": (1, 3.0)}
    with pytest.raises(ValueError, match="run pytest with `--durations 0`"):
        read_durations("3 passed")


def test_seconds_of_files_in_a_log_replace_the_known_ones() -> None:
    this, other = "tests/structure/test_selection.py", "tests/conftest.py"
    log = f"2.00s call     {this}::test_one\n0.50s setup    {this}::test_two"
    assert updated({this: 9.0, other: 1.0, "tests/test_gone.py": 3.0}, log) == {other: 1.0, this: 2.5}


def test_table_is_replaced_in_its_place() -> None:
    page = "before\n<!-- a -->\n\nold\n\n<!-- end of a -->\nafter\n"
    assert replace_table(page, "a", ["| new |"]) == "before\n<!-- a -->\n\n| new |\n\n<!-- end of a -->\nafter\n"
    assert "durations" in replace_table(Path(PAGE).read_text(encoding="utf-8"), "durations", [])
    with pytest.raises(ValueError, match="has no place for nothing"):
        replace_table(page, "nothing", [])
