"""Free memory: that of the machine, of the process's cgroup or of one above it, whichever is least."""

from __future__ import annotations

from pathlib import Path

import pytest

from axon_nb.host.resources import free_memory
from tests.host.resources.cgroups import Cgroups

MACHINE = 2 << 20


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """2 MiB are free on the machine."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  99 kB\nMemAvailable:     2048 kB\n")
    return meminfo


def _v2(limit: str, used: int, cache: int) -> dict[str, str]:
    stat = f"anon 1\ninactive_file {cache}\n"
    return {"memory.max": f"{limit}\n", "memory.current": f"{used}\n", "memory.stat": stat}


@pytest.mark.parametrize("group", ["/", "/user.slice/job.scope"])
def test_own_cgroup_limits_free_memory(tmp_path: Path, machine: Path, group: str) -> None:
    groups = Cgroups(tmp_path, f"0::{group}\n")
    assert free_memory(groups.root, groups.own, machine) == MACHINE
    groups.set(group, _v2("1000000", 700_000, 200_000))
    assert free_memory(groups.root, groups.own, machine) == 500_000
    groups.set(group, _v2("1000000", 1_500_000, 200_000))
    assert free_memory(groups.root, groups.own, machine) == 0
    groups.set(group, _v2("max", 700_000, 200_000))
    assert free_memory(groups.root, groups.own, machine) == MACHINE
    assert free_memory(groups.root, groups.own, tmp_path / "none") is None


def test_tightest_cgroup_limits_free_memory(tmp_path: Path, machine: Path) -> None:
    groups = Cgroups(tmp_path, "0::/batch.slice/job.slice/task.scope\n")
    groups.set("/batch.slice/job.slice/task.scope", _v2("1000000", 100_000, 0))
    groups.set("/batch.slice/job.slice", _v2("1500000", 1_400_000, 20_000))
    groups.set("/batch.slice", _v2("max", 1_600_000, 0))
    groups.set("/other.slice", _v2("10", 10, 0))
    assert free_memory(groups.root, groups.own, machine) == 120_000


def test_cgroup_v1_limits_free_memory(tmp_path: Path, machine: Path) -> None:
    groups = Cgroups(tmp_path, "7:cpu:/\n4:memory:/docker/3f1c\n0::/\n")
    unlimited = {"memory.limit_in_bytes": "9223372036854771712\n", "memory.usage_in_bytes": "5\n"}
    groups.set("/memory", unlimited)
    assert free_memory(groups.root, groups.own, machine) == MACHINE
    assert free_memory(groups.root, groups.own, tmp_path / "none") is None
    stat = "inactive_file 7\ntotal_inactive_file 300000\n"
    limited = {"memory.limit_in_bytes": "900000\n", "memory.usage_in_bytes": "800000\n", "memory.stat": stat}
    groups.set("/memory/docker/3f1c", limited)
    assert free_memory(groups.root, groups.own, machine) == 400_000


def test_free_memory_of_this_machine_is_read() -> None:
    free = free_memory()
    assert free is not None
    assert free > 0
