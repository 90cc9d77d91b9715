"""Cores and memory within limits of control groups, and ranks that the kernel kills for memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from axon_nb.host.children import OOM_KILLS, OomCounter, counter_file, read_number
from axon_nb.host.resources import free_memory, usable_cores
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

MACHINE = 2 << 20

EVENTS = "low 0\nhigh 0\nmax 12\noom 2\noom_kill {}\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
MOUNT_V2 = "41 31 0:38 {root} {point} rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
MOUNT_V1 = (
    "34 31 0:31 / {other} rw,relatime - cgroup cgroup rw,cpuset\n"
    "35 31 0:32 {root} {point} rw,relatime - cgroup cgroup rw,memory\n"
)


class Cgroups:
    """Cgroups of some machine."""

    def __init__(self, folder: Path, listed: str) -> None:
        """Make them in `folder`; a process is in those `listed`."""
        self.root = folder / "cgroup"
        self.root.mkdir()
        self.own = folder / "own"
        self.own.write_text(listed)

    def set(self, group: str, files: Mapping[str, str]) -> None:
        """Write files of one cgroup, such as ``/user.slice``; on version 1 the mount's name comes first."""
        folder = self.root / group.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)


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


def made(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


@pytest.mark.parametrize(("root", "path", "below"), [("/", "/a/b", "a/b"), ("/pod", "/pod/b", "b"), ("/pod", "/", ".")])
def test_cgroup_v2_and_v1_counters_are_found(tmp_path: Path, root: str, path: str, below: str) -> None:
    mounts, groups = tmp_path / "mountinfo", tmp_path / "cgroup"
    two = made(tmp_path / "two" / below, "memory.events", EVENTS.format(3))
    mounts.write_text(MOUNT_V2.format(root=root, point=tmp_path / "two"))
    groups.write_text(f"0::{path}\n")
    found = counter_file(groups, mounts)
    assert found is not None
    assert found.samefile(two)

    one = made(tmp_path / "one" / below, "memory.oom_control", CONTROL.format(3))
    (tmp_path / "set").mkdir()
    mounts.write_text(MOUNT_V1.format(root=root, point=tmp_path / "one", other=tmp_path / "set"))
    groups.write_text(f"8:pids:/\n4:memory:{path}\n0::/\n")
    found = counter_file(groups, mounts)
    assert found is not None
    assert found.samefile(one)


def test_cgroup_v1_is_used_if_v2_lacks_memory(tmp_path: Path) -> None:
    one = made(tmp_path / "one", "memory.oom_control", CONTROL.format(0))
    (tmp_path / "two").mkdir()
    mounts, groups = tmp_path / "mountinfo", tmp_path / "cgroup"
    v1 = MOUNT_V1.format(root="/", point=tmp_path / "one", other=tmp_path / "two")
    mounts.write_text(v1 + MOUNT_V2.format(root="/", point=tmp_path / "two"))
    groups.write_text("4:memory:/\n0::/\n")
    assert counter_file(groups, mounts) == one


def test_missing_or_empty_file_has_no_counter(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    assert counter_file(tmp_path / "absent", tmp_path / "absent") is None
    assert counter_file(tmp_path / "empty", tmp_path / "empty") is None


@pytest.mark.parametrize(("text", "count"), [(EVENTS.format(7), 7), (CONTROL.format(0), 0), ("oom 3\n", None)])
def test_oom_kill_counters_are_parsed(tmp_path: Path, text: str, count: int | None) -> None:
    assert read_number(made(tmp_path, "file", text), OOM_KILLS) == count
    assert read_number(tmp_path / "absent", OOM_KILLS) is None


def test_increased_count_means_out_of_memory(tmp_path: Path) -> None:
    own = made(tmp_path, "own", EVENTS.format(1))
    machine = made(tmp_path, "vmstat", "pgfault 5\noom_kill 9\n")
    counter = OomCounter(own, machine)
    assert counter.poll() is False
    own.write_text(EVENTS.format(2))
    assert counter.poll() is True
    machine.write_text("oom_kill 10\n")
    assert counter.poll() is False, "another cgroup's process"


def test_machine_wide_count_only_rules_oom_out(tmp_path: Path) -> None:
    machine = made(tmp_path, "vmstat", "oom_kill 9\n")
    counter = OomCounter(tmp_path / "absent", machine)
    assert counter.poll() is False
    machine.write_text("oom_kill 10\n")
    assert counter.poll() is None
    machine.unlink()
    assert counter.poll() is None


def test_counter_files_of_this_machine_are_read() -> None:
    file = counter_file(Path("/proc/self/cgroup"), Path("/proc/self/mountinfo"))
    if file is None:
        pytest.skip("this machine has no cgroup with a counter of memory kills")
    assert read_number(file, OOM_KILLS) is not None
    assert OomCounter().poll() is False
