"""Shared-memory blocks: anonymous memory files that another process of the same user opens."""

from __future__ import annotations

import fcntl
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from axon_nb.host import shared_memory
from axon_nb.host.shared_memory import (
    SharedBlock,
    SharedBlockUnavailableError,
    join_parts,
    read_block,
    split_parts,
    write_block,
)

pytestmark = pytest.mark.skipif(not shared_memory.memfd_supported(), reason="needs memfd_create")

SMALL = [b"head", b"", bytes(range(256)) * 3]
LARGE = [b"head", os.urandom(3 << 20), b"tail"]
HUGE = [b"head", bytes(40 << 20) + b"end", b"tail"]


@pytest.mark.parametrize("parts", [SMALL, LARGE, HUGE, []], ids=["small", "large", "huge", "none"])
def test_parts_round_trip(parts: list[bytes]) -> None:
    with SharedBlock() as block:
        assert block.empty
        block.write(parts)
        assert [bytes(part) for part in read_block(block.address)] == parts
    assert [bytes(part) for part in split_parts(join_parts(parts))] == parts


def test_each_reader_gets_a_private_copy() -> None:
    with SharedBlock() as block:
        block.write(LARGE)
        first, second = read_block(block.address)[1], block.read()[1]
    first[:4] = b"mine"
    assert bytes(first[:4]) == b"mine"
    assert bytes(second) == LARGE[1]


def test_large_parts_are_aligned_to_64_bytes() -> None:
    with SharedBlock() as block:
        block.write(LARGE)
        parts = block.read()
    assert isinstance(parts[1].obj, mmap.mmap)
    assert shared_memory._offsets([len(part) for part in LARGE])[0][1] % 64 == 0


def test_block_is_filled_and_sealed_by_another_process() -> None:
    code = (
        "import ast, sys; from axon_nb.host.shared_memory import write_block\n"
        "write_block(ast.literal_eval(sys.argv[1]), [b'from the child', bytes(2 << 20)])"
    )
    with SharedBlock() as block:
        subprocess.run([sys.executable, "-c", code, repr(block.address)], check=True)
        assert bytes(block.read()[0]) == b"from the child"
        with pytest.raises(PermissionError):
            block.write([b"again"])


def test_incomplete_block_cannot_be_read() -> None:
    with SharedBlock() as block, pytest.raises(ValueError, match="incomplete"):
        block.read()


@pytest.mark.parametrize("file", [0, 1])
def test_closed_or_replaced_block_is_reported(file: int) -> None:
    opened = len(os.listdir("/proc/self/fd"))
    with SharedBlock() as block:
        address = list(block.address)
        address[file] = address[file][0], address[file][1] + 1
        with pytest.raises(SharedBlockUnavailableError, match="different file"):
            read_block((address[0], address[1]))
        gone = block.address
    with pytest.raises(SharedBlockUnavailableError):
        write_block(gone, [b"late"])
    assert len(os.listdir("/proc/self/fd")) == opened


def test_other_users_cannot_open_the_block() -> None:
    if os.getuid() != 0:
        pytest.skip("needs root, to become another user")
    with SharedBlock() as block:
        block.write(SMALL)
        code = "import os, sys; os.setuid(65534); open(sys.argv[1], 'rb')"
        for path, _ in block.address:
            run = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=False)
            assert "PermissionError" in run.stderr


def test_blocks_have_no_name_in_dev_shm() -> None:
    """Checks this process only: others create and delete files there."""

    def mapped() -> set[str]:
        return {line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm" in line}

    before = mapped()
    with SharedBlock() as block:
        block.write(LARGE)
        parts = block.read()
        assert all(os.readlink(path).startswith("/memfd:") for path, _ in block.address)
        assert bytes(parts[1]) == LARGE[1]
        assert mapped() <= before


SPLIT = 8192
PIECES = {
    "all in the first": [(0, 100), (192, SPLIT - 192)],
    "across the split": [(0, 100), (192, 3 * SPLIT), (192 + 3 * SPLIT, 7)],
    "all but the header in the second": [(0, 8), (SPLIT, 5000)],
    "at the split and empty": [(64, SPLIT - 64), (SPLIT, 0)],
}


@pytest.mark.parametrize("name", PIECES)
def test_chunks_are_written_to_the_right_file(name: str) -> None:
    pieces = [(place, memoryview(os.urandom(size))) for place, size in PIECES[name]]
    wanted = bytearray(max(SPLIT, *(place + len(view) for place, view in pieces)))
    for place, view in pieces:
        wanted[place : place + len(view)] = view
    files = os.memfd_create("first"), os.memfd_create("second")
    try:
        for fd, size in zip(files, (SPLIT, len(wanted) - SPLIT), strict=True):
            os.ftruncate(fd, size)
        shared_memory.copy_into(files, pieces, SPLIT)
        assert os.pread(files[0], SPLIT, 0) + os.pread(files[1], len(wanted), 0) == wanted
    finally:
        for fd in files:
            os.close(fd)


@pytest.mark.parametrize("cores", [1, 2])
def test_large_data_is_split_over_two_files(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "usable_cores", lambda: cores)
    content = os.urandom(1 << 20) * 33 + b"the end"
    opened = len(os.listdir("/proc/self/fd"))
    with SharedBlock() as block:
        block.write([b"head", content, b"tail"])
        sizes = [os.stat(path).st_size for path, _ in block.address]
        parts = block.read()
        same = block.read()
    assert (sizes[1] > 0) is (cores == 2)
    assert sum(sizes) >= len(content)
    same[1][:3] = b"own"
    assert [bytes(part) for part in parts] == [b"head", content, b"tail"]
    # Memory that is mapped keeps no file open, and goes with the last view of it.
    assert len(os.listdir("/proc/self/fd")) == opened
    maps = Path("/proc/self/maps")
    assert "/memfd:axon_nb" in maps.read_text()
    del parts, same
    assert "/memfd:axon_nb" not in maps.read_text()


def test_error_in_the_second_thread_is_raised() -> None:
    files = os.memfd_create("first"), os.memfd_create("second", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(files[1], fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW)
    try:
        with pytest.raises(PermissionError):
            shared_memory.copy_into(files, [(0, memoryview(bytes(10_000)))], 4096)
    finally:
        for fd in files:
            os.close(fd)


INTERRUPTED = """
import gc, os, random, signal, threading, time
from axon_nb.host import shared_memory
from axon_nb.host.shared_memory import SharedBlock, read_block, write_block

def interrupt(*_):
    raise KeyboardInterrupt

def transfer():
    with SharedBlock() as block, SharedBlock() as other:
        write_block(block.address, [b"a", content])
        other.write(block.read())
        assert bytes(read_block(other.address)[0]) == b"a"

content = bytes(100)
transfer()
before, hit, generator = os.listdir("/proc/self/fd"), 0, random.Random(1)
signal.signal(signal.SIGALRM, interrupt)
for number in range(3000):
    if number == 2900:
        content = bytes(34 << 20)
        shared_memory.usable_cores = lambda: 2
    try:
        signal.setitimer(signal.ITIMER_REAL, generator.uniform(1e-6, 4e-4 if number < 2900 else 4e-2))
        transfer()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        hit += 1
for thread in threading.enumerate()[1:]:  # interrupted while it was starting: does nothing
    while thread.is_alive():
        time.sleep(0.01)
gc.collect()
assert os.listdir("/proc/self/fd") == before, os.listdir("/proc/self/fd")
assert "memfd" not in open("/proc/self/maps").read()
print(hit > 100)
"""


def test_interrupt_at_any_time_leaks_no_descriptor() -> None:
    ran = subprocess.run([sys.executable, "-c", INTERRUPTED], check=False, capture_output=True, text=True, timeout=300)
    assert (ran.returncode, ran.stdout) == (0, "True\n"), ran.stderr


def test_block_is_read_without_address_space_for_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(files: object) -> mmap.mmap:
        raise OSError("no room")

    monkeypatch.setattr(shared_memory, "map_files", none)
    monkeypatch.setattr(shared_memory, "usable_cores", lambda: 2)
    with SharedBlock() as block:
        block.write(HUGE)
        assert os.stat(block.address[1][0]).st_size
        assert [bytes(part) for part in block.read()] == HUGE
