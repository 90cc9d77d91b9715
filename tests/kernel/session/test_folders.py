"""Sessions in unusual surroundings: a read-only home, long paths, little shared memory, other users and programs."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.kernel import Kernel
from tests.support.processes import footprint, listening

MakeKernel = Callable[..., Kernel]

WORKS = "%%distributed\nt = torch.ones(1); dist.all_reduce(t); t.item()"

NEIGHBOUR = """
import encodings.idna, os, socket, struct, sys
os.setuid(12345)
held = []
for port in map(int, sys.argv[1:]):
    for number in range(40):  # of connections that are to come: the listener keeps them until then
        held.append(socket.create_connection(("127.0.0.1", port)))
        held[-1].sendall(struct.pack("=q", number))
print("connected", flush=True)
sys.stdin.read()
"""
SUM = "t = torch.full((4,), rank + 1.0)\ndist.all_reduce(t, group=t_group)\nt.tolist()"


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder with a short path."""
    with tempfile.TemporaryDirectory(prefix="axp-") as folder:
        yield Path(folder)


def test_read_only_home(new_kernel: MakeKernel, scratch: Path) -> None:
    kernel = new_kernel(HOME="/nonexistent", IPYTHONDIR="", TMPDIR=str(scratch))
    kernel.ok("%load_ext axon_nb")
    before = set(scratch.iterdir())
    kernel.ok("%distributed start -n 2")
    assert kernel.ok(WORKS).lines() == ["[ranks 0-1] 2.0"]
    assert set(scratch.iterdir()) == before, "no rank leaves a folder behind"
    kernel.ok("%distributed stop")


@pytest.mark.parametrize("runtime", ["missing", "long", "a file"])
def test_long_temporary_path(new_kernel: MakeKernel, scratch: Path, runtime: str) -> None:
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
    print("".join(error._render_traceback_()[-2:-1]))
print(cluster.run("dist.barrier(); 'alive'").values)
cluster.stop()
"""


def run_with_mount(options: str, folder: str, script: str, **env: str) -> str:
    """What a script prints for which a small file system is mounted at a folder."""
    mount = f'mount -t tmpfs -o {options} none {folder} && exec "$@"'
    mounted = ["unshare", "--mount", "sh", "-c", mount, "sh"]
    if (
        not sys.platform.startswith("linux")
        or subprocess.run([*mounted, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip(f"needs the right to mount a file system at {folder}")
    done = subprocess.run(
        [*mounted, sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), **env},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(600)
def test_packages_from_a_folder_of_pythonpath_are_not_the_users(new_kernel: MakeKernel, tmp_path: Path) -> None:
    (tmp_path / "modules").symlink_to(sysconfig.get_path("purelib"))  # a copy of torch would take 500 MB
    (tmp_path / "train.py").write_text("import torch.distributed as dist\ndef step():\n    dist.barrier()\n")
    kernel = new_kernel(PYTHONPATH=str(tmp_path / "modules"))
    kernel.ok("%load_ext axon_nb\n%distributed start -n 2")
    torch_file = f"[ranks 0-1] {str(tmp_path / 'modules/torch/__init__.py')!r}"
    assert kernel.ok("%%distributed\nfrom train import step\ntorch.__file__").lines() == [torch_file]
    reply = kernel.run("%%distributed\nif rank == 0: step()")
    assert "rank 0 waits in barrier at line 2 (step, train.py line 3) for rank 1" in reply.traceback
    reply = kernel.run("%%distributed\nif rank == 1: 1 / 0\nout = [None] * 2\ndist.all_gather_object(out, 1)")
    assert "[rank 0] waited in all_gather_object at line 4\n" in reply.traceback + "\n"


def test_small_shared_memory_is_reported_with_the_setting() -> None:
    said = run_with_mount("size=1m", "/dev/shm", LOADER)
    lines = said.splitlines()
    assert lines[0] == "{0: 2.0, 1: 2.0}"
    assert "/dev/shm holds 1.00 MiB" in said
    assert "`num_workers=0`" in said
    assert lines[-1] == "{0: 'alive', 1: 'alive'}"


GROUP_MEMORY = """
import axon_nb
from axon_nb.cluster.session import current

current.session().settings.set("group_memory=1MiB")
cluster = axon_nb.start(4)
code = '''
import itertools, re
from pathlib import Path
def mapped():
    sizes = [int(end, 16) - int(start, 16) for start, end in
             re.findall(r"^(\\w+)-(\\w+) .*memfd:axon_nb_group", Path("/proc/self/maps").read_text(), re.M)]
    return bool(sizes) and max(sizes) <= 1 << 20
t = torch.arange(2_000_003.0) + rank
dist.all_reduce(t)
assert torch.equal(t, torch.arange(2_000_003.0) * 4 + 6)
rows = [torch.empty(300_000) for _ in range(4)]
dist.all_gather(rows, torch.full((300_000,), float(rank)))
assert all(bool((row == number).all()) for number, row in enumerate(rows))
t = torch.full((1_000_000,), float(rank))
other = torch.empty_like(t)
ops = [dist.P2POp(dist.isend, t, (rank + 1) % 4), dist.P2POp(dist.irecv, other, (rank - 1) % 4)]
works = dist.batch_isend_irecv(ops)
for work in works: work.wait()
mapped(), other.unique().tolist()
'''
expected = {rank: (True, [float((rank - 1) % 4)]) for rank in range(4)}
print(cluster.run(code).values == expected)
try:
    cluster.run("if rank == 1: raise ValueError('bug')\\ndist.barrier()")
except axon_nb.CellError as error:
    print(error)
print(cluster.run(code).values == expected)
cluster.stop()
"""


def test_shared_memory_setting_applies_with_full_dev_shm() -> None:
    said = run_with_mount("size=64k", "/dev/shm", GROUP_MEMORY)
    assert said.splitlines() == ["True", "rank 1: ValueError: bug", "True"]


FULL_DISK = """
import os
from pathlib import Path
import axon_nb

base = Path(os.environ["AXON_NB_RUNTIME_DIR"])

def fill():
    with open(base / "rest", "ab", buffering=0) as rest:
        try:
            while True: rest.write(bytes(4096))
        except OSError as error:
            print("full:", error.strerror)

cluster = axon_nb.start(2)
cluster.run("kept = rank + 10")
fill()
print("printed", cluster.run("print('said', rank)").text)
try:
    cluster.run("if rank == 1: raise ValueError('bug')\\ndist.barrier()")
except axon_nb.CellError as error:
    print(error)
cluster.push({"big": bytes(10 << 20)})
print("pulled", {rank: len(value) for rank, value in cluster.pull("big").items()})
print("kept", cluster.run("t = torch.ones(1 << 18); dist.all_reduce(t); (kept, t[0].item())").values)
cluster.stop()
fill()
try:
    axon_nb.start(2)
except axon_nb.AxonError as error:
    print("refused", type(error).__name__, error)
os.remove(base / 'rest')
again = axon_nb.start(2)
print("again", again.run("dist.barrier(); rank").values)
again.stop()
print("left", [str(path.relative_to(base)) for path in base.rglob("*")])
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_full_disk_loses_no_state_and_is_reported_by_the_next_start(scratch: Path) -> None:
    said = run_with_mount("size=8m,mode=700", str(scratch), FULL_DISK, AXON_NB_RUNTIME_DIR=str(scratch))
    lines = [line for line in said.splitlines() if not line.startswith("[rank")]
    full, printed, failed, pulled, kept, full_again, refused, again, left = lines
    assert full == full_again == "full: No space left on device"
    assert printed == r"printed {0: 'said 0\n', 1: 'said 1\n'}"
    assert failed == "rank 1: ValueError: bug"
    assert pulled == "pulled {0: 10485760, 1: 10485760}"
    assert kept == "kept {0: (10, 2.0), 1: (11, 2.0)}"
    folder = scratch / f"axon_nb-{os.getuid()}"
    assert refused == (
        f"refused StartError Cannot create the cluster's files in {folder}: No space left on device. Free space there, "
        "or set AXON_NB_RUNTIME_DIR to a short path on another local disk."
    )
    assert again == "again {0: 0, 1: 1}"
    assert left == f"left [{folder.name!r}]"


@pytest.fixture
def gloo_kernel() -> Iterator[Kernel]:
    """A kernel with 2 ranks on Gloo."""
    if os.getuid() != 0:
        pytest.skip("needs root, to become another user")
    with Kernel(env={"AXON_NB_CPU_BACKEND": "gloo"}) as kernel:
        kernel.ok("%load_ext axon_nb\n%distributed start -n 2")
        yield kernel


def test_groups_reject_connections_of_another_user(gloo_kernel: Kernel) -> None:
    cluster = footprint(gloo_kernel)
    processes = [process for process in cluster.processes if process.pid in cluster.ranks]
    ports = {str(entry.laddr.port) for entry in listening(dataclasses.replace(cluster, processes=tuple(processes)))}
    assert ports
    command = [sys.executable, "-c", NEIGHBOUR, *sorted(ports)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as neighbour:
        assert neighbour.stdout is not None
        assert neighbour.stdout.readline() == "connected\n"
        reply = gloo_kernel.run("%%distributed\nt_group = dist.new_group([0, 1])")
        assert "connections to this rank are from user 12345" in reply.traceback
        gloo_kernel.ok(f"%%distributed\nt_group = dist.new_group([0, 1])\n{SUM}")
        assert gloo_kernel.ok(f"%%distributed\n{SUM}").lines() == ["[ranks 0-1] [3.0, 3.0, 3.0, 3.0]"]
        neighbour.communicate()


def test_renamed_cluster_is_found_by_its_new_name(kernel: Kernel) -> None:
    kernel.ok("import axon_nb")
    old = kernel.value("axon_nb.current_cluster().name")
    new = f"{old}-again"
    try:
        assert kernel.ok(f"%distributed rename {new}").stdout.strip() == f"The cluster {old!r} is now {new!r}."
        assert kernel.value("axon_nb.current_cluster().name") == new
        found = kernel.value(
            "[one.name for one in __import__('axon_nb.doctor.clusters', fromlist=['_']).find_clusters()]"
        )
        assert new in found
        assert old not in found
    finally:
        kernel.ok(f"%distributed rename {old}")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("rename", "the following arguments are required: NEW"),
        ("rename a/b", "A cluster's name takes letters, digits, `.`, `_` and `-`; got 'a/b'."),
    ],
)
def test_bad_name_is_refused_in_one_sentence(kernel: Kernel, line: str, sentence: str) -> None:
    assert sentence in kernel.run(f"%distributed {line}").evalue


def test_explain_names_the_state(kernel: Kernel) -> None:
    assert kernel.ok("%distributed explain").stdout.startswith("No cell is running.")
