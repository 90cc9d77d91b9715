"""Parcels: anonymous files in memory that another process of the same user opens."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from axon_nb.host import parcel_filling, parcels
from axon_nb.host.free_memory import free_memory
from axon_nb.host.parcels import Parcel, ParcelUnreachable, join_parts, read_parcel, split_parts, write_parcel

pytestmark = pytest.mark.skipif(not parcels.supported(), reason="needs memfd_create")

SMALL = [b"head", b"", bytes(range(256)) * 3]
LARGE = [b"head", os.urandom(3 << 20), b"tail"]
HUGE = [b"head", bytes(40 << 20) + b"end", b"tail"]


@pytest.mark.parametrize("parts", [SMALL, LARGE, HUGE, []], ids=["small", "large", "huge", "none"])
def test_parts_come_back_as_they_were(parts: list[bytes]) -> None:
    with Parcel() as parcel:
        assert parcel.empty
        parcel.write(parts)
        assert [bytes(part) for part in read_parcel(parcel.address)] == parts
    assert [bytes(part) for part in split_parts(join_parts(parts))] == parts


def test_each_reader_has_a_copy_of_its_own() -> None:
    with Parcel() as parcel:
        parcel.write(LARGE)
        first, second = read_parcel(parcel.address)[1], parcel.read()[1]
    first[:4] = b"mine"
    assert bytes(first[:4]) == b"mine"
    assert bytes(second) == LARGE[1]


def test_large_parts_are_mapped_at_multiples_of_64() -> None:
    with Parcel() as parcel:
        parcel.write(LARGE)
        parts = parcel.read()
    assert isinstance(parts[1].obj, mmap.mmap)
    assert parcels._places([len(part) for part in LARGE])[0][1] % 64 == 0


def test_another_process_fills_and_seals_it() -> None:
    code = (
        "import sys; from axon_nb.host.parcels import write_parcel\n"
        "write_parcel((sys.argv[1], int(sys.argv[2])), [b'from the child', bytes(2 << 20)])"
    )
    with Parcel() as parcel:
        path, inode = parcel.address
        subprocess.run([sys.executable, "-c", code, path, str(inode)], check=True)
        assert bytes(parcel.read()[0]) == b"from the child"
        with pytest.raises(PermissionError):
            parcel.write([b"again"])


def test_what_is_not_complete_is_refused() -> None:
    with Parcel() as parcel, pytest.raises(ValueError, match="not complete"):
        parcel.read()


def test_a_parcel_that_is_gone_or_another_is_told() -> None:
    with Parcel() as parcel:
        path, inode = parcel.address
        with pytest.raises(ParcelUnreachable, match="another file"):
            read_parcel((path, inode + 1))
    with pytest.raises(ParcelUnreachable):
        write_parcel((path, inode), [b"late"])


def test_other_users_cannot_open_it() -> None:
    if os.getuid() != 0:
        pytest.skip("needs root, to become another user")
    with Parcel() as parcel:
        parcel.write(SMALL)
        code = "import os, sys; os.setuid(65534); open(sys.argv[1], 'rb')"
        run = subprocess.run(
            [sys.executable, "-c", code, parcel.address[0]], capture_output=True, text=True, check=False
        )
    assert "PermissionError" in run.stderr


def test_nothing_has_a_name_in_dev_shm() -> None:
    """Only this process is looked at: others have files there that come and go."""

    def mapped() -> set[str]:
        return {line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm" in line}

    before = mapped()
    with Parcel() as parcel:
        parcel.write(LARGE)
        parts = parcel.read()
        assert os.readlink(parcel.address[0]).startswith("/memfd:")
        assert bytes(parts[1]) == LARGE[1]
        assert mapped() <= before


def test_free_memory_is_that_of_machine_or_cgroup(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  99 kB\nMemAvailable:     2048 kB\n")
    assert free_memory(tmp_path / "none", meminfo) == 2 << 20
    for name, text in {
        "memory.max": "1000000\n",
        "memory.current": "700000\n",
        "memory.stat": "anon 1\ninactive_file 200000\n",
    }.items():
        (tmp_path / name).write_text(text)
    assert free_memory(tmp_path, meminfo) == 500_000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(tmp_path, meminfo) == 2 << 20
    assert free_memory(tmp_path, tmp_path / "none") is None


@pytest.mark.parametrize("helped", [False, True])
@pytest.mark.parametrize("place", [64, 4096 * 3 + 128])
def test_large_memory_is_copied_by_one_or_two_threads(
    place: int, helped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parcel_filling, "_core_is_idle", lambda: helped)
    content = os.urandom(1 << 20) * 33 + b"the end"
    fd = os.memfd_create("test")
    try:
        os.ftruncate(fd, place + len(content) + 5)
        parcel_filling.fill(fd, place, memoryview(content), helped=helped)
        assert os.pread(fd, place, 0) == bytes(place)
        assert os.pread(fd, len(content), place) == content
        assert os.pread(fd, 99, place + len(content)) == bytes(5)
    finally:
        os.close(fd)


def test_what_the_second_thread_cannot_do_the_first_one_does() -> None:
    content = os.urandom(1 << 20) * 40
    with open("/dev/null", "wb") as nothing:
        helper = parcel_filling._Helper(nothing.fileno(), 0, memoryview(content))
        helper.start()
        helper.stop()
    assert helper.done == 0
