"""`scripts/test` runs files with failures again, and hides nothing."""

from __future__ import annotations

import datetime as dt
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.run_tests import FLAKY_DAYS, ROOT, files_to_repeat, known_flaky, verdict

FLAKY = """
from pathlib import Path
import pytest

SEEN = Path(__file__).with_name("seen")

def test_that_passes_the_second_time():
    if not SEEN.exists():
        SEEN.touch()
        pytest.fail("too early")
"""
BROKEN = """
def test_that_never_passes():
    assert 1 == 2
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder for tests inside the project, as pytest names other files without their folder."""
    (ROOT / "out").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "out", prefix="tests-") as name:
        yield Path(name)


def run(folder: Path, **variables: str) -> tuple[int, str]:
    """Run the tests in a folder by `scripts/test`: the exit status, and what it printed."""
    out = folder / "out"
    out.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "scripts.run_tests", "all", "-p", "no:cacheprovider", str(folder)],
        cwd=ROOT,
        env={**os.environ, "OUT": str(out), "WORKERS": "1", "STRICT": "", **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def failed(*tests: str, kind: str = "failure") -> list[dict[str, str]]:
    return [{"kind": kind, "test": test} for test in tests]


def test_flaky_test_passes_and_is_recorded_with_evidence(folder: Path) -> None:
    (folder / "test_flaky.py").write_text(FLAKY)
    status, shown = run(folder)
    assert status == 0, shown
    assert "flaky, 1" in shown
    (line,) = map(json.loads, (folder / "out" / "flaky.jsonl").read_text().splitlines())
    assert line["test"].endswith("test_flaky.py::test_that_passes_the_second_time")
    assert line["passed"] == "alone"
    assert "too early" in Path(line["evidence"]).read_text()


def test_strict_forgives_nothing(folder: Path) -> None:
    (folder / "test_flaky.py").write_text(FLAKY)
    status, shown = run(folder, STRICT="1")
    assert status == 1
    assert "No second pass: STRICT is set." in shown
    assert not (folder / "out" / "flaky.jsonl").exists()


def test_repeated_failure_fails_the_run(folder: Path) -> None:
    (folder / "test_broken.py").write_text(BROKEN)
    status, shown = run(folder)
    assert status == 1
    assert "again, alone" in shown
    assert "again, beside two busy processes" in shown
    assert "failed again:" in shown


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        (failed("tests/a.py::test_x", "tests/a.py::test_y[1]"), ""),
        (failed("tests/a.py::test_x", kind="leftover"), ""),
        (failed("", kind="leftover"), "the failure belongs to no file"),
        (failed("", kind="crash"), "a worker crashed"),
        (failed("tests/a.py", kind="collection"), "tests could not be collected"),
        (failed(*(f"tests/a.py::test_{i}" for i in range(11))), "more than 10 tests failed"),
        ([], "the failure belongs to no file"),
    ],
)
def test_only_isolated_failures_rerun(records: list[dict[str, str]], reason: str) -> None:
    assert verdict(records) == reason


def test_files_run_again_once_and_in_order() -> None:
    assert files_to_repeat(failed("b.py::x", "a.py::y", "b.py::z[1]")) == ["b.py", "a.py"]


def test_flaky_tests_are_few_described_and_recent() -> None:
    known = tomllib.loads((ROOT / "tests" / "flaky.toml").read_text(encoding="utf-8"))
    assert list(known) == known_flaky()
    assert len(known) <= 10
    for test, facts in known.items():
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8")
        assert facts.keys() == {"date", "symptom", "cause", "where"}
        assert facts["where"] in ("product", "test")
        assert dt.date.today() - facts["date"] <= dt.timedelta(days=FLAKY_DAYS), f"fix {test}"
