"""Cores by affinity and by the container's quota, whichever is less."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from axon_nb.host.cores import usable_cores
from tests.host.agents import ROOT

CORES = len(os.sched_getaffinity(0))

V2 = [
    ("max 100000\n", CORES),
    ("100000 100000\n", 1),
    ("50000 100000\n", 1),
    ("1000 100000\n", 1),
    ("150000 100000\n", min(2, CORES)),
    ("200000 100000\n", min(2, CORES)),
    (f"{CORES * 100000} 100000\n", CORES),
    (f"{(CORES + 7) * 100000} 100000\n", CORES),
    (f"{CORES * 20000} 20000\n", CORES),
    ("", CORES),
    ("max\n", CORES),
    ("many few\n", CORES),
]


@pytest.mark.parametrize(("text", "cores"), V2, ids=[repr(text) for text, _ in V2])
def test_the_quota_of_a_container(tmp_path: Path, text: str, cores: int) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert usable_cores(tmp_path) == cores


V1 = [("-1", CORES), ("0", CORES), ("100000", 1), ("30000", 1), ("150000", min(2, CORES)), ("soon", CORES)]


@pytest.mark.parametrize(("quota", "cores"), V1)
def test_the_quota_of_an_older_container(tmp_path: Path, quota: str, cores: int) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(quota + "\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(tmp_path) == cores


def test_an_older_container_without_a_period_has_no_quota(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("100000\n")
    assert usable_cores(tmp_path) == CORES


def test_outside_a_container_affinity_counts(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == CORES
    script = (
        "import os\nfrom pathlib import Path\nfrom axon_nb.host.cores import usable_cores\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nprint(usable_cores(Path('/nowhere')))"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
