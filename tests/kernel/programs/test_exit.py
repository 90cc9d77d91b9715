"""What Python does when a process ends happens on ranks, too: exit handlers run, and files are written."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import axon_nb
from axon_nb.cluster.cluster import Cluster
from axon_nb.cluster.session import clusters, current

LEAVE = """
import atexit, gzip, multiprocessing.shared_memory, pathlib
folder = pathlib.Path({folder!r})
plain = open(folder / f"plain{{rank}}", "w"); plain.write("x" * 100)
packed = gzip.open(folder / f"packed{{rank}}", "wt"); packed.write("y" * 1000)
atexit.register(lambda: (folder / f"handler{{rank}}").write_text("ran"))
memory = multiprocessing.shared_memory.SharedMemory(create=True, size=1000, name={name!r} + str(rank))
"""


@pytest.mark.parametrize("end", [Cluster.stop, lambda _: clusters.restart()], ids=["stop", "restart"])
def test_exit_handlers_run_and_files_are_written(end: Callable[[Cluster], object], tmp_path: Path) -> None:
    cluster = axon_nb.start(2)
    name = f"axon-test-{os.getpid()}-"
    try:
        cluster.run(LEAVE.format(folder=str(tmp_path), name=name))
        end(cluster)
        for rank in range(2):
            assert (tmp_path / f"plain{rank}").read_text() == "x" * 100
            assert gzip.decompress((tmp_path / f"packed{rank}").read_bytes()) == b"y" * 1000
            assert (tmp_path / f"handler{rank}").read_text() == "ran"
        assert not [one for one in os.listdir("/dev/shm") if one.startswith(name)]
    finally:
        if (left := current.get()) is not None:
            left.stop()


def test_hung_exit_handler_is_killed(tmp_path: Path) -> None:
    cluster = axon_nb.start(2)
    began = tmp_path / "began"
    cluster.run(
        f"import atexit, pathlib, time\n"
        f"atexit.register(lambda: (pathlib.Path({str(began)!r}).write_text('x'), time.sleep(600)))"
    )
    pids = [info.pid for info in cluster.rank_info]
    cluster.stop()
    assert began.exists()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
