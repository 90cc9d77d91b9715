"""Print the tests that a change can break, one path per line; `scripts/test --changed` runs them after the quick ones.

    python -m scripts.changed_tests          # what differs from the last landing (.ci/landed), committed or not
    python -m scripts.changed_tests HEAD~3   # what differs from a commit

Coverage cannot tell: most code runs in kernels and forked ranks. So a table says which tests run which package. What it
does not list, such as pyproject.toml, can break everything. Where time is limited, the files closest to the change run;
in CI also the turn of this landing: every file of tests runs at least once in TURNS landings, whatever they change.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from zlib import crc32

ROOT = Path(__file__).resolve().parents[1]
LANDED = ROOT / ".ci" / "landed"
"""Names the commit that the present work started from."""
DURATIONS = ROOT / "tests" / "durations.json"
"""Seconds by file; `scripts/test_tables.py` writes it."""
QUICK = (
    "tests/js/",
    "tests/parity/",
    "tests/plan/test_displays.py",
    "tests/plan/test_links.py",
    "tests/plan/test_schedule.py",
    "tests/structure/",
    "tests/unit/",
)
"""Tests that start no ranks, by the beginning of their paths: they run with every change."""
BY_CHANGE = (
    "tests/plan/test_links.py",
    "tests/structure/runner/test_run_tests.py",
    "tests/unit/course/",
    "tests/unit/output/test_limits.py",
)
"""But these, which compute for long, run with the changes that can break them, and in their turn."""
TURNS = 41
"""Each file of tests has its turn once in so many landings; with 41, a turn takes 125 s on average, 270 s at most."""
KERNEL = "tests/kernel"
VIEWS = f"{KERNEL}/views"
TESTS: dict[str, tuple[str, ...]] = {
    ".ci/": (),
    "axon_nb/cli.py": ("tests/doctor",),
    "axon_nb/cluster/": (
        *(f"tests/{folder}" for folder in ("api", "cluster", "doctor", "front_ends", "remote")),
        KERNEL,
        "tests/unit/output/test_limits.py",
    ),
    "axon_nb/comm/": ("tests/comm", "tests/compat", "tests/engine", "tests/parallel", "tests/unit/course"),
    "axon_nb/compat/": ("tests/compat", "tests/frameworks", f"{KERNEL}/cells/test_scripts.py"),
    "course/axon_course/": ("tests/examples/test_course.py", "tests/unit/course"),
    "axon_nb/doctor/": ("tests/doctor",),
    "axon_nb/engine/snapshot/": ("tests/cluster/snapshot",),
    "axon_nb/engine/": ("tests/engine", "tests/frameworks", KERNEL),
    "axon_nb/export/": ("tests/examples", f"{KERNEL}/cells/test_scripts.py"),
    "axon_nb/host/": (
        "tests/cluster",
        "tests/host",
        f"{KERNEL}/failures/test_deaths.py",
        f"{KERNEL}/session/test_lifecycle.py",
    ),
    "axon_nb/lab/": ("tests/browser/test_panel.py", "tests/remote/test_jupyter_server.py"),
    "axon_nb/magics/": ("tests/front_ends", KERNEL),
    "axon_nb/parallel/": (
        "tests/parallel",
        "tests/unit/course",
        *(f"{KERNEL}/recovery/test_{name}.py" for name in ("pipelines", "sharded_steps")),
    ),
    "axon_nb/plan/": ("tests/plan", f"{KERNEL}/views/test_what_if.py"),
    "axon_nb/records/": ("tests/cluster", "tests/engine", "tests/host", KERNEL),
    "axon_nb/remote/": ("tests/remote",),
    "axon_nb/script/": ("tests/unit/export/", "tests/cluster/test_scripts.py"),
    "axon_nb/shell/": ("tests/cluster", "tests/engine", KERNEL),
    "axon_nb/torch_api.py": ("tests/comm", "tests/compat", "tests/engine", "tests/parallel", KERNEL),
    "axon_nb/widgets/": ("tests/browser", VIEWS),
    "benchmarks/": (),
    "binder/": ("tests/packaging",),
    "course/": ("tests/examples/test_course.py", "tests/unit/course"),
    "docs/": ("tests/docs",),
    "examples/": ("tests/examples",),
    "magics/": ("tests/front_ends", KERNEL),
    "scripts/": ("tests/structure/runner/test_run_tests.py",),
}
"""By the beginning of a path, the tests that run it, besides those that always run."""


def select(changed: Iterable[str]) -> list[str]:
    """Return the paths of tests to run besides the quick ones.

    Args:
        changed: Paths of changed files, relative to the root.
    """
    found: set[str] = set()
    for path in changed:
        if path.startswith("tests/"):
            found.update(_tests_of(path))
        elif not path.endswith(".md"):
            rows = [tests for start, tests in TESTS.items() if path.startswith(start)]
            found.update(rows[0] if rows else ["tests"])
    return sorted(path for path in found if not any(str(folder) in found for folder in Path(path).parents))


def affordable(
    paths: Iterable[str], changed: Iterable[str], limit_s: float, turn: Iterable[str] = ()
) -> tuple[list[str], list[str]]:
    """Split selected tests, without the quick ones, into files to run and files for which the time is too short.

    Args:
        paths: Files and folders, as `select` returns them.
        changed: Changed paths. Of the selected files these come first, then those whose paths share the most words with
            a changed path (`failures`, `hints`), then the shortest.
        limit_s: Seconds that all files to run may take together, one after the other; a file without a known duration
            counts as the mean of the others.
        turn: Files that run in any case. They use up to half of the limit; beyond that, they exceed it.
    """
    seconds: dict[str, float] = json.loads(DURATIONS.read_text(encoding="utf-8"))
    mean = sum(seconds.values()) / len(seconds)
    found = [
        file for path in paths for file in ([ROOT / path] if path.endswith(".py") else (ROOT / path).rglob("test_*.py"))
    ]
    turn, words = set(turn), {path: _words(path) for path in changed}

    def order(name: str) -> tuple[bool, int, float]:
        shared = max((len(_words(name) & each) for each in words.values()), default=0)
        return name not in words, -shared, seconds.get(name, mean)

    names = {str(file.relative_to(ROOT)) for file in found} - turn
    taken, left_out, spent = [], [], min(limit_s / 2, sum(seconds.get(name, mean) for name in turn))
    for name in sorted((name for name in names if not runs_always(name)), key=order):
        spent += seconds.get(name, mean)
        (taken if spent <= limit_s else left_out).append(name)
    return taken, left_out


def turn_of(landing: int) -> list[str]:
    """Return the files of tests whose turn it is. A file's path alone decides, so that other files cannot move it."""
    files = (file.relative_to(ROOT).as_posix() for file in (ROOT / "tests").rglob("test_*.py"))
    in_turn = (file for file in files if crc32(file.encode()) % TURNS == landing % TURNS)
    return sorted(file for file in in_turn if not runs_always(file))


def runs_always(test: str) -> bool:
    """Return whether a test, or all of a file, runs with every change."""
    return test.startswith(QUICK) and not test.startswith(BY_CHANGE)


def landings() -> int:
    """Return the number of landings so far: .ci/landed names the last one, which names the one before, and so on."""
    seen = [LANDED.read_text(encoding="utf-8").strip()]
    while not (before := _git("show", f"{seen[-1]}:.ci/landed")).returncode and before.stdout.strip() not in seen:
        seen.append(before.stdout.strip())
    return len(seen)


def _words(path: str) -> set[str]:
    """Return what a path says about its subject."""
    return set(re.split(r"[/_.]", path)) - {"", "axon", "init", "nb", "py", "test", "tests"}


def _tests_of(path: str) -> list[str]:
    """The tests in a file, or those that use it: by an import, or as a conftest.py above them."""
    file = Path(path)
    if file.name.startswith("test_"):
        return [path] if (ROOT / path).exists() else []
    if file.parent == Path("tests") and file.suffix in (".json", ".toml"):
        return []  # they say which tests run, and in what order: the quick tests check them
    if file.name == "conftest.py" or file.suffix != ".py":
        return [str(file.parent)]
    module = re.compile(rf"\b{re.escape('.'.join(file.with_suffix('').parts))}\b")
    users = [str(user.relative_to(ROOT)) for user in sorted((ROOT / "tests").rglob("*.py"))]
    users = [user for user in users if user != path and module.search((ROOT / user).read_text(encoding="utf-8"))]
    return [test for user in users for test in _tests_of(user)]


def changed_since(base: str | None = None) -> list[str]:
    """Return the paths that differ from a commit, committed or not.

    Args:
        base: The commit; None: the last landing. A checkout that lacks that commit has no changes.
    """
    if base is None:
        base = LANDED.read_text(encoding="utf-8").strip()
        if not (ROOT / ".git").exists() or _git("cat-file", "-e", f"{base}^{{commit}}").returncode:
            return []
    changed = _git("diff", "--name-only", "--merge-base", base, check=True).stdout.splitlines()
    return changed + _git("ls-files", "--others", "--exclude-standard", check=True).stdout.splitlines()


def main() -> int:
    """Print the selection."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", nargs="?", help="what to compare with (default: the last landing)")
    print("\n".join(select(changed_since(parser.parse_args().base))))
    return 0


def _git(*command: str, check: bool = False) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=check)


if __name__ == "__main__":
    sys.exit(main())
