"""How findings become text and JSON, and how a cgroup's limits are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from axon_nb.doctor.machine import cgroup_limit
from axon_nb.doctor.report import Finding, Report, Section

FINE = Finding("cores", "8 usable")
SMALL = Finding("/dev/shm", "64.0 MiB", "problem", "Workers fail.", "Run `docker run --shm-size=1g IMAGE`.")
LEFT = Finding("train", "2 ranks, left", "note", "It keeps memory.", "Run `axon-nb stop train`.")
LOST = [Finding(f"capability {n}", "lost", "problem", f"Without it {n}.", "Run `pip install torch`.") for n in "ab"]


def report(*findings: Finding) -> Report:
    return Report("axon_nb 0.1.0 doctor", (Section("host", findings),))


def test_nothing_to_fix() -> None:
    assert report(FINE).text() == "axon_nb 0.1.0 doctor: no problems\n\nhost\n  cores  8 usable"
    assert report(FINE).status == 0


def test_problems_come_first_then_notes_then_the_facts() -> None:
    text = report(LEFT, FINE, SMALL).text()
    assert text.startswith("axon_nb 0.1.0 doctor: 1 problem, 1 note\n\nPROBLEM  /dev/shm: 64.0 MiB. Workers fail.\n")
    assert "\n         fix: Run `docker run --shm-size=1g IMAGE`.\n\nnote     train: " in text
    assert text.endswith("host\n  train     note: 2 ranks, left\n  cores     8 usable\n  /dev/shm  PROBLEM: 64.0 MiB")
    assert report(SMALL).status == 1
    assert report(LEFT).status == 0


def test_shared_fix_is_shown_once() -> None:
    text = report(*LOST).text()
    assert text.count("fix: ") == 1
    assert "\nPROBLEM  capability a: lost. Without it a.\n         capability b: lost. Without it b.\n" in text


def test_lines_are_short_and_commands_unbroken() -> None:
    long = Finding("x", "word " * 60, "problem", "more " * 60, f"Run `{'a' * 150}`.")
    lines = report(long).text().splitlines()
    assert all(len(line) <= 76 or "a" * 150 in line for line in lines)


def test_every_problem_has_a_fix() -> None:
    with pytest.raises(ValueError, match="without a fix"):
        Finding("x", "broken", "problem")


def test_json_is_complete() -> None:
    content = json.loads(report(FINE, SMALL).json())
    assert (content["problems"], content["notes"]) == (1, 0)
    assert content["sections"]["host"]["findings"][1]["fix"] == SMALL.fix


def test_tightest_cgroup_limit_applies(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/user.slice/job\n")
    job = tmp_path / "user.slice" / "job"
    job.mkdir(parents=True)
    (tmp_path / "cgroup.controllers").touch()
    (job / "memory.max").write_text("max\n")
    (job / "memory.current").write_text("123\n")
    assert cgroup_limit("memory", root=tmp_path, own=own) is None
    (tmp_path / "user.slice" / "memory.max").write_text("4096\n")
    assert cgroup_limit("memory", root=tmp_path, own=own) == (4096, 0)
    (tmp_path / "user.slice" / "memory.current").write_text("1000\n")
    assert cgroup_limit("memory", root=tmp_path, own=own) == (4096, 1000)
    (job / "memory.max").write_text("2000\n")
    assert cgroup_limit("memory", root=tmp_path, own=own) == (2000, 123)


def test_cgroup_v1_limits_are_read(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("8:pids:/job\n4:cpu,memory:/\n0::/\n")
    (tmp_path / "pids" / "job").mkdir(parents=True)
    (tmp_path / "memory").mkdir()
    (tmp_path / "pids" / "job" / "pids.max").write_text("64\n")
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert cgroup_limit("pids", root=tmp_path, own=own) == (64, 0)
    assert cgroup_limit("memory", root=tmp_path, own=own) is None
