"""`scripts/test --changed` selects what a change can break, and lets the other files take turns."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from scripts import changed_tests
from scripts.changed_tests import DURATIONS, ROOT, TESTS, TURNS, affordable, runs_always, select, turn_of

FAILURES = "tests/kernel/failures"


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
            ["tests/kernel/views/test_plan_names.py", "tests/kernel/views/test_what_if.py", "tests/plan"],
        ),
        (["axon_nb/plan/skeleton.py", "magics/pull.py"], ["tests/front_ends", "tests/kernel", "tests/plan"]),
        (["pyproject.toml", "axon_nb/host/children.py"], ["tests"]),
        (["tests/host/resources/test_oom.py"], ["tests/host/resources/test_oom.py"]),
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
