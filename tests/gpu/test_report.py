"""The report of a machine with GPUs: what of making it needs none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import gpu_report, gpu_status
from tests.gpu.drill import drill

ROOT = Path(__file__).resolve().parents[2]
NO_GPU = pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU")


@NO_GPU
def test_without_a_gpu_one_sentence_says_so(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    command = [sys.executable, "-m", "scripts.gpu_report", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == "No GPU report: this machine has no NVIDIA GPU."
    assert done.stdout == ""
    assert not out.exists()


def test_each_reason_for_no_report_is_its_own_sentence() -> None:
    build = {"torch": "2.13.0", "cuda": "13.0", "gpus": 1}
    card = {"gpus": [{"name": "H200"}]}
    assert gpu_report.absence(build, card) == ""
    assert "without CUDA" in gpu_report.absence({"torch": "2.13.0+cpu", "cuda": None, "gpus": 0}, card)
    assert "cannot use the GPUs" in gpu_report.absence({**build, "gpus": 0}, card)
    assert "cannot be imported" in gpu_report.absence({}, card)


TESTS = """
import pytest
def test_right(record_property):
    record_property("planned_bytes", 12)
def test_wrong():
    assert 1 == 2, "as planned"
def test_left_out():
    pytest.skip("needs two GPUs")
"""


def test_results_are_those_of_pytest(tmp_path: Path) -> None:
    (tmp_path / "test_three.py").write_text(TESTS)
    junit = tmp_path / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={junit}", str(tmp_path)]
    subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=110, check=False)
    results = gpu_report.read_results(junit)
    assert results["passed"] == ["test_three::test_right"]
    assert "as planned" in results["failed"]["test_three::test_wrong"]
    assert "needs two GPUs" in results["skipped"]["test_three::test_left_out"]
    assert results["figures"] == {"test_three::test_right": {"planned_bytes": "12"}}


def test_the_readme_shows_the_reports_newest_first(tmp_path: Path) -> None:
    assert "| not run |" in gpu_status.table([])
    report: dict[str, Any] = {
        "date": "2026-01-02",
        "gpus": [{"name": "H200"}],
        "versions": {"torch": "2.13.0", "nccl": "2.28.3"},
        "tests": {"passed": ["a", "b"], "failed": {"c": "why"}},
        "drill": {"table": {"x": {"abort": {"ended": True}}, "y": {"abort": {"ended": False}}}},
    }
    for name, date in (("old.json", "2026-01-02"), ("new.json", "2026-02-03")):
        (tmp_path / name).write_text(json.dumps({**report, "date": date}))
    lines = gpu_status.table(gpu_status.read(tmp_path)).splitlines()
    assert lines[2] == (
        "| 1 x H200 | 2.13.0, 2.28.3 | 2 passed, 1 failed | 1 of 2 | [2026-02-03](docs/gpu_reports/new.json) |"
    )
    assert len(lines) == 4


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_drills_on_cpus_end_by_abort_and_by_timeout() -> None:
    (found,) = drill(["a receive without a send"], ["abort", "timeout"], gloo=True).values()
    for end in found.values():
        assert end["ended"]
        assert "raised" in end
        assert end["device works"]
    assert drill(["a kernel that takes half a minute"], ["abort"], gloo=True) == {
        "a kernel that takes half a minute": {"abort": {"not run": "needs 1 GPUs"}}
    }


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_figures_can_be_measured_on_cpus(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(out), "--cpu", "2"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ}, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    figures = json.loads(out.read_text())
    assert len(figures) == 6
    assert all(value > 0 for value in figures.values() if isinstance(value, float))
