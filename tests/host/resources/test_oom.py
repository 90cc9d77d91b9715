"""Out-of-memory kills, detected from Linux's counters."""

from __future__ import annotations

from pathlib import Path

import pytest

from axon_nb.host.children import OomCounter, counter_file, read_count

EVENTS = "low 0\nhigh 0\nmax 12\noom 2\noom_kill {}\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
V2 = "41 31 0:38 {root} {point} rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "34 31 0:31 / {other} rw,relatime - cgroup cgroup rw,cpuset\n"
    "35 31 0:32 {root} {point} rw,relatime - cgroup cgroup rw,memory\n"
)


def made(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


@pytest.mark.parametrize(("root", "path", "below"), [("/", "/a/b", "a/b"), ("/pod", "/pod/b", "b"), ("/pod", "/", ".")])
def test_cgroup_v2_and_v1_counters_are_found(tmp_path: Path, root: str, path: str, below: str) -> None:
    mounts, groups = tmp_path / "mountinfo", tmp_path / "cgroup"
    two = made(tmp_path / "two" / below, "memory.events", EVENTS.format(3))
    mounts.write_text(V2.format(root=root, point=tmp_path / "two"))
    groups.write_text(f"0::{path}\n")
    found = counter_file(groups, mounts)
    assert found is not None
    assert found.samefile(two)

    one = made(tmp_path / "one" / below, "memory.oom_control", CONTROL.format(3))
    (tmp_path / "set").mkdir()
    mounts.write_text(V1.format(root=root, point=tmp_path / "one", other=tmp_path / "set"))
    groups.write_text(f"8:pids:/\n4:memory:{path}\n0::/\n")
    found = counter_file(groups, mounts)
    assert found is not None
    assert found.samefile(one)


def test_cgroup_v1_is_used_if_v2_lacks_memory(tmp_path: Path) -> None:
    one = made(tmp_path / "one", "memory.oom_control", CONTROL.format(0))
    (tmp_path / "two").mkdir()
    mounts, groups = tmp_path / "mountinfo", tmp_path / "cgroup"
    v1 = V1.format(root="/", point=tmp_path / "one", other=tmp_path / "two")
    mounts.write_text(v1 + V2.format(root="/", point=tmp_path / "two"))
    groups.write_text("4:memory:/\n0::/\n")
    assert counter_file(groups, mounts) == one


def test_missing_or_empty_file_has_no_counter(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    assert counter_file(tmp_path / "absent", tmp_path / "absent") is None
    assert counter_file(tmp_path / "empty", tmp_path / "empty") is None


@pytest.mark.parametrize(("text", "count"), [(EVENTS.format(7), 7), (CONTROL.format(0), 0), ("oom 3\n", None)])
def test_oom_kill_counters_are_parsed(tmp_path: Path, text: str, count: int | None) -> None:
    assert read_count(made(tmp_path, "file", text)) == count
    assert read_count(tmp_path / "absent") is None


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
    assert read_count(file) is not None
    assert OomCounter().poll() is False
