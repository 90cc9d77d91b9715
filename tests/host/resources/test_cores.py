"""Cores by affinity and by the quota of the process's cgroup or one above it, whichever is least."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from axon_nb.host.resources import usable_cores
from tests.host.resources.cgroups import Cgroups
from tests.support.agents import ROOT

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
    ("100000 0\n", CORES),
    ("many few\n", CORES),
]


@pytest.mark.parametrize(("text", "cores"), V2, ids=[repr(text) for text, _ in V2])
@pytest.mark.parametrize("group", ["/", "/user.slice/job.scope"])
def test_quota_of_the_processs_cgroup_applies(tmp_path: Path, group: str, text: str, cores: int) -> None:
    groups = Cgroups(tmp_path, f"0::{group}\n")
    groups.set(group, {"cpu.max": text})
    assert usable_cores(groups.root, groups.own) == cores


def test_smallest_quota_of_parent_cgroups_applies(tmp_path: Path) -> None:
    groups = Cgroups(tmp_path, "0::/batch.slice/job.slice/task.scope\n")
    groups.set("/batch.slice/job.slice/task.scope", {"cpu.max": f"{(CORES + 3) * 100000} 100000\n"})
    groups.set("/batch.slice", {"cpu.max": "max 100000\n"})
    assert usable_cores(groups.root, groups.own) == CORES
    groups.set("/batch.slice", {"cpu.max": "50000 100000\n"})
    groups.set("/other.slice", {"cpu.max": "1000 100000\n"})
    assert usable_cores(groups.root, groups.own) == 1


V1 = [("-1", CORES), ("0", CORES), ("100000", 1), ("30000", 1), ("150000", min(2, CORES)), ("soon", CORES)]
MOUNTS = [("cpu", "/docker/3f1c"), ("cpu,cpuacct", "/docker/3f1c"), ("cpuacct,cpu", "/"), ("cpu", "/../host")]
"""Names of a mount, and the path that it lists: in a container often the host's, which is not mounted there."""


@pytest.mark.parametrize(("quota", "cores"), V1)
@pytest.mark.parametrize(("mount", "group"), MOUNTS)
def test_cgroup_v1_container_quota_applies(tmp_path: Path, mount: str, group: str, quota: str, cores: int) -> None:
    groups = Cgroups(tmp_path, f"9:memory:/elsewhere\n4:{mount}:{group}\n0::/\n")
    groups.set(f"/{mount}", {"cpu.cfs_quota_us": f"{quota}\n", "cpu.cfs_period_us": "100000\n"})
    assert usable_cores(groups.root, groups.own) == cores


def test_cgroup_v1_slice_quota_applies(tmp_path: Path) -> None:
    groups = Cgroups(tmp_path, "4:cpu,cpuacct:/job/task\n")
    groups.set("/cpu", {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"})
    groups.set("/cpu/job", {"cpu.cfs_quota_us": "100000\n", "cpu.cfs_period_us": "100000\n"})
    groups.set("/cpu/job/task", {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"})
    assert usable_cores(groups.root, groups.own) == 1


def test_cgroup_v1_without_a_period_has_no_quota(tmp_path: Path) -> None:
    groups = Cgroups(tmp_path, "1:cpu:/\n")
    groups.set("/cpu", {"cpu.cfs_quota_us": "100000\n"})
    assert usable_cores(groups.root, groups.own) == CORES


@pytest.mark.parametrize("listed", ["", "\n", "nothing of use\n", "1:memory:/\n", "0::/gone\n"])
def test_cgroup_without_quota_does_not_limit(tmp_path: Path, listed: str) -> None:
    groups = Cgroups(tmp_path, listed)
    assert usable_cores(groups.root, groups.own) == CORES


def test_root_cgroup_applies_if_none_is_listed(tmp_path: Path) -> None:
    groups = Cgroups(tmp_path, "")
    groups.set("/", {"cpu.max": "100000 100000\n"})
    assert usable_cores(groups.root, tmp_path / "none") == 1


def test_affinity_applies_outside_a_container(tmp_path: Path) -> None:
    assert usable_cores(tmp_path / "none") == CORES
    script = (
        "import os\nfrom pathlib import Path\nfrom axon_nb.host.resources import usable_cores\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nprint(usable_cores(Path('/nowhere')))"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
