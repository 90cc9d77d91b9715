"""The report of a machine with GPUs: what of making it needs none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from scripts import gpu_status
from scripts.gpu_box import NO_GPU, Box
from scripts.gpu_box_parts import PARTS, Item, Part
from scripts.gpu_box_wheels import install_missing
from tests.gpu.drill import drill
from tests.support.processes import until

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_GPU = pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU")
SLEEPER = "import subprocess, sys, time\nprint('{\"before\": 1}', flush=True)\n"
SLEEPER += "print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)\ntime.sleep(600)"


def box(tmp_path: Path, out: str = "first", deadline_s: float = 100.0) -> Box:
    """A call of the script; all calls leave their copies in one folder."""
    return Box(tmp_path / out, deadline_s, tmp_path / "folder")


def saved(tmp_path: Path, out: str = "first") -> dict[str, Any]:
    """The parts of a call's report."""
    return dict(json.loads((tmp_path / out / "report.json").read_text())["parts"])


@WITHOUT_GPU
def test_missing_gpu_is_reported_in_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "scripts/gpu_box.py", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (1, "", NO_GPU)
    assert not (tmp_path / "report.json").exists()


def test_hung_item_is_killed_with_its_descendants(tmp_path: Path) -> None:
    part = Part(
        "p", [Item("sleeps", ("-c", SLEEPER), 4.0, gpus=0), Item("next", ("-c", "print('{\"x\": 2}')"), 60.0, 0)]
    )
    assert box(tmp_path).run_part(part, gpus=0)
    found = saved(tmp_path)["p"]
    assert (found["sleeps"]["outcome"], found["sleeps"]["why"]) == ("failed", "did not end within 4 s")
    assert found["sleeps"]["figures"] == {"before": 1}
    child = int(found["sleeps"]["tail"].split()[-1])
    assert until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)
    assert (found["next"]["outcome"], found["next"]["figures"]) == ("passed", {"x": 2})


def test_results_are_written_while_an_item_runs(tmp_path: Path) -> None:
    code = "import json, time\nfrom pathlib import Path\nprint('{\"early\": 1}', flush=True)\n"
    code += f"path = Path({str(tmp_path / 'first' / 'report.json')!r})\n"
    code += "while not path.exists() or 'early' not in path.read_text(): time.sleep(0.05)\nprint('{\"seen\": 1}')"
    assert box(tmp_path).run_part(Part("p", [Item("looks", ("-c", code), 60.0, gpus=0)]), gpus=0)
    assert saved(tmp_path)["p"]["looks"]["figures"] == {"early": 1, "seen": 1}


TESTS = """
import pathlib, pytest, time
def test_right(record_property):
    record_property("planned_bytes", 12)
    with open(pathlib.Path(__file__).parent / "runs", "a") as file:
        file.write("x")
def test_wrong():
    assert 1 == 2, "as planned"
def test_left_out():
    pytest.skip("needs two GPUs")
def test_takes_long():
    if (pathlib.Path(__file__).parent / "wait").exists():
        time.sleep(600)
"""


def test_next_call_resumes_after_the_deadline(tmp_path: Path) -> None:
    (tmp_path / "test_four.py").write_text(TESTS)
    (tmp_path / "wait").touch()
    arguments = ("-m", "pytest", "-q", "-p", "tests.gpu.json_lines", "-p", "no:cacheprovider", str(tmp_path))
    part = Part("p", [Item("four", arguments, 200.0, gpus=0), Item("last", ("-c", ""), 60.0, gpus=0)])
    assert not box(tmp_path, deadline_s=20.0).run_part(part, gpus=0)
    (tmp_path / "wait").unlink()
    assert len(saved(tmp_path)["p"]["four"]["tests"]) == 3
    assert box(tmp_path, "second").run_part(part, gpus=0)
    tests = {name.partition("::")[2]: test for name, test in saved(tmp_path, "second")["p"]["four"]["tests"].items()}
    assert {name: test["outcome"] for name, test in tests.items()} == {
        "test_right": "passed",
        "test_wrong": "failed",
        "test_left_out": "skipped",
        "test_takes_long": "passed",
    }
    assert (tmp_path / "runs").read_text() == "x"
    assert "as planned" in tests["test_wrong"]["why"]
    assert "needs two GPUs" in tests["test_left_out"]["why"]
    assert tests["test_right"]["figures"] == {"planned_bytes": 12}
    assert saved(tmp_path, "second")["p"]["last"]["outcome"] == "passed"


def test_items_start_only_with_time_and_gpus_available(tmp_path: Path) -> None:
    part = Part("p", [Item("card", ("-c", ""), 60.0), Item("cpu", ("-c", ""), 60.0, gpus=0)])
    assert not box(tmp_path, deadline_s=1.0).run_part(part, gpus=0)
    assert box(tmp_path).run_part(part, gpus=0)
    found = saved(tmp_path)["p"]
    assert found["card"] == {"outcome": "not run", "why": "needs 1 GPU"}
    assert found["cpu"]["outcome"] == "passed"


def test_pinned_packages_match_the_constraints() -> None:
    pins = [line for line in (ROOT / "scripts" / "gpu_box.txt").read_text().splitlines() if not line.startswith("#")]
    constraints = (ROOT / "constraints.txt").read_text().replace("_", "-").lower().splitlines()
    assert len(pins) > 20
    assert set(pins) <= set(constraints)


def test_installed_package_is_not_reinstalled(tmp_path: Path) -> None:
    install_missing(tmp_path / "no wheels", tmp_path / "site")  # this Python has all of them
    assert not (tmp_path / "site").exists()


def test_report_parts_name_each_item_once() -> None:
    for part in PARTS:
        assert len({item.name for item in part.items}) == len(part.items)
    assert [part.name for part in PARTS][:3] == ["doctor", "smoke", "tests"]


def test_pages_show_the_newest_report_first(tmp_path: Path) -> None:
    assert "| not run |" in gpu_status.table([])
    report: dict[str, Any] = {
        "date": "2026-01-02",
        "gpus": [{"name": "H200"}],
        "versions": {"torch": "2.13.0", "nccl": "2.28.3"},
        "parts": {
            "tests": {
                "test_x": {
                    "outcome": "failed",
                    "seconds": 3,
                    "tests": {"a": {"outcome": "passed"}, "b": {"outcome": "passed"}, "c": {"outcome": "failed"}},
                },
                "test_y": {"outcome": "not run", "why": "needs 2 GPUs"},
            },
            "drills": {
                "x": {"outcome": "passed", "figures": {"table": {"x": {"abort": {"ended": True}}}}},
                "y": {"outcome": "failed", "figures": {"table": {"y": {"abort": {"ended": False}}}}},
            },
        },
    }
    file = tmp_path / "report.json"
    for date in ("2026-01-02", "2026-02-03"):
        file.write_text(json.dumps({**report, "date": date}))
        gpu_status.add(file, tmp_path / "reports")
    reports = gpu_status.read(tmp_path / "reports")
    lines = gpu_status.table(reports).splitlines()
    link = "[2026-02-03](docs/gpu_reports/2026-02-03-h200-x1.json)"
    assert lines[2] == f"| 1 x H200 | 2.13.0, 2.28.3 | 2 passed, 1 failed | 1 of 2 | {link} |"
    assert len(lines) == 4
    assert "| tests | 2 | 1 | 1 | 3 |" in gpu_status.parts_table(reports[0][1])


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


@WITHOUT_GPU
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_figures_can_be_measured_on_cpus() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ}, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    figures: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            figures |= json.loads(line)
    assert len(figures) == 13
    assert all(value > 0 for value in figures.values() if isinstance(value, float))
