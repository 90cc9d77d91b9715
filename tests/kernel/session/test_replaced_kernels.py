"""What a failed test leaves on a shared kernel does not reach the next one: that gets a fresh kernel."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

TESTS = """
import signal
import psutil
import pytest
from jupyter_client import BlockingKernelClient
from tests.support.processes import ended, footprint

SLEEP = "%%distributed{}\\nimport time\\nprint('asleep', flush=True)\\ntime.sleep(600)"
left = []

def works(kernel):
    assert all(map(ended, left)), "the earlier kernel and its cluster were killed"
    assert kernel.ok("%%distributed\\n1").lines() == ["[ranks 0-3] 1"]
    left[:] = [psutil.Process(kernel.pid), *footprint(kernel).processes]

@pytest.fixture
def asks_at_its_end(shared_kernel):
    yield
    shared_kernel.ok("1")

@pytest.fixture
def fails_to_end():
    yield
    raise ValueError("fails to end")

def test_start(monkeypatch, request):
    def fail(*_, **__):
        raise TimeoutError("fails to start")
    monkeypatch.setattr(BlockingKernelClient, "wait_for_ready", fail)
    request.getfixturevalue("kernel")

def test_background_cell(kernel):
    works(kernel)
    kernel.ok(SLEEP.format(" --noblock --out cell"))
    raise ValueError("leaves a cell in the background")

def test_cell(kernel, asks_at_its_end):
    works(kernel)
    signal.setitimer(signal.ITIMER_REAL, 11)  # pytest's limit for the test is near
    kernel.ok(SLEEP.format(""))

def test_teardown(kernel, fails_to_end):
    works(kernel)
    kernel.ok(SLEEP.format(" --noblock --out cell"))

def test_the_last_one(kernel):
    works(kernel)
"""
EXPECTED = [
    ("ERROR", "teardown", "ValueError: fails to end"),
    ("FAILED", "background_cell", "ValueError: leaves a cell in the background"),
    ("FAILED", "cell", "TimeoutError: this cell is not over after 1 s:"),
    ("FAILED", "start", "TimeoutError: fails to start"),
]
"""The summary's lines; a fixture that finds its kernel killed when it ends adds none."""


@pytest.mark.timeout(600)
def test_shared_kernel_is_replaced_after_a_failed_test(tmp_path: Path) -> None:
    file = tmp_path / "test_shared.py"
    file.write_text(TESTS)
    plugins = [f"-p{name}" for name in ("no:cacheprovider", "no:xdist", "tests.conftest", "tests.kernel.conftest")]
    options = ["-c", str(ROOT / "pyproject.toml"), "-q", "-rfE"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, *options, str(file)],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "300"},
        capture_output=True,
        text=True,
        timeout=590,
        check=False,
    )
    said = re.findall(r"^(FAILED|ERROR) \S*::test_(\w+) - (.*)$", done.stdout, re.MULTILINE)
    said = [(kind, test, re.sub(r"after \d+ s", "after 1 s", reason)) for kind, test, reason in said]
    assert sorted(said) == EXPECTED, done.stdout + done.stderr
    assert "2 passed" in done.stdout, done.stdout
    assert "left running" not in done.stdout, done.stdout
