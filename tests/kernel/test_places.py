"""Where the folders are not as usual: no home to write to, long paths, little shared memory."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.kernel import Kernel

MakeKernel = Callable[..., Kernel]

WORKS = "%%distributed\nt = torch.ones(1); dist.all_reduce(t); t.item()"


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder with a short path."""
    with tempfile.TemporaryDirectory(prefix="axp-") as folder:
        yield Path(folder)


def test_a_home_that_cannot_be_written_to(new_kernel: MakeKernel, scratch: Path) -> None:
    kernel = new_kernel(HOME="/nonexistent", IPYTHONDIR="", TMPDIR=str(scratch))
    kernel.ok("%load_ext axon_nb")
    before = set(scratch.iterdir())
    kernel.ok("%distributed start -n 2")
    assert kernel.ok(WORKS).lines() == ["[ranks 0-1] 2.0"]
    assert set(scratch.iterdir()) == before, "no rank leaves a folder behind"
    kernel.ok("%distributed stop")


@pytest.mark.parametrize("runtime", ["missing", "long", "a file"])
def test_a_temporary_folder_with_a_long_path(new_kernel: MakeKernel, scratch: Path, runtime: str) -> None:
    long = scratch / ("x" * 150)
    long.mkdir()
    plain = scratch / "file"
    plain.touch()
    places = {"missing": "/nonexistent", "long": str(long), "a file": str(plain)}
    kernel = new_kernel(TMPDIR=str(long), XDG_RUNTIME_DIR=places[runtime], AXON_NB_RUNTIME_DIR="")
    kernel.ok("%load_ext axon_nb\n%distributed start -n 2")
    assert kernel.ok(WORKS).lines() == ["[ranks 0-1] 2.0"]
    kernel.ok("%distributed stop")


LOADER = """
import axon_nb

cluster = axon_nb.start(2)
print(cluster.run("t = torch.ones(1 << 18); dist.all_reduce(t); t[0].item()").values)
code = '''from torch.utils.data import DataLoader, TensorDataset
for batch in DataLoader(TensorDataset(torch.randn(256, 4096)), batch_size=128, num_workers=1): pass'''
try:
    cluster.run(code, timeout=300)
except axon_nb.errors.CellError as error:
    print("".join(error._render_traceback_()[-1:]))
print(cluster.run("dist.barrier(); 'alive'").values)
cluster.stop()
"""


@pytest.mark.timeout(600)
def test_little_shared_memory_is_named_with_what_to_set() -> None:
    small = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=1m none /dev/shm && exec "$@"', "sh"]
    if (
        not sys.platform.startswith("linux")
        or subprocess.run([*small, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("needs the right to mount a small /dev/shm")
    done = subprocess.run(
        [*small, sys.executable, "-c", LOADER],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "{0: 2.0, 1: 2.0}"
    assert "/dev/shm holds 1.00 MiB" in done.stdout
    assert "`num_workers=0`" in done.stdout
    assert lines[-1] == "{0: 'alive', 1: 'alive'}"
