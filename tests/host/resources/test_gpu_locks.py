"""GPUs that a cluster has reserved: others leave them alone, and a cluster that dies gives them up."""

from __future__ import annotations

import os
import pwd
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from axon_nb.cluster.launch.placement import Layout, plan_layout
from axon_nb.errors import UsageError
from axon_nb.host.resources import GpuLocks, gpu_owners
from axon_nb.records.protocol.agent import ReserveGpus
from tests.support.agents import Served, dead, serve
from tests.support.nvidia_smi import A100X4, MIG, Driver
from tests.support.processes import until

NOBODY = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
FIRST = "GPU-5c0e8f1a-3f6f-1b5e-9d0c-6a1f1d9a7b10"
Reserve = Callable[[str, Layout], tuple[Served, dict[str, str]]]


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A machine with four cards, of which 1 is in use."""
    driver = Driver(tmp_path, monkeypatch)
    driver.prints(A100X4)
    return driver


@pytest.fixture
def reserve() -> Iterator[Reserve]:
    """Starts an agent that reserves the GPUs of a layout; returns it, and which are taken."""
    agents: list[Served] = []

    def start(name: str, layout: Layout) -> tuple[Served, dict[str, str]]:
        agents.append(serve(entry="", controller=[], owner=name))
        return agents[-1], dict(agents[-1].client.call(ReserveGpus(layout.reserves, name)).owners)

    yield start
    for agent in agents:
        agent.end()


def test_second_cluster_gets_the_gpus_that_the_first_left(driver: Driver, reserve: Reserve) -> None:
    first = plan_layout(1)
    assert first.reserves == (FIRST,), "one rank needs one of the three free cards"
    agent, taken = reserve("first", first)
    assert not taken
    second = plan_layout(None)
    assert (second.visible, second.num_ranks) == ("2,3", 2)
    assert second.notes[0] == (
        "Skipping GPU 0 (reserved by the cluster 'first'): run `axon-nb stop first` if it is not needed any more, or "
        "pass `--devices 0` to share it."
    )
    _, taken = reserve("second", second)
    assert not taken
    with pytest.raises(UsageError, match="NCCL needs GPUs, and none is free here"):
        plan_layout(2, backend="nccl")
    assert not agent.client.call(ReserveGpus(first.reserves, "first")).owners, "what it has it may ask for again"


def test_named_gpu_is_shared_and_the_other_cluster_named(driver: Driver, reserve: Reserve) -> None:
    reserve("first", plan_layout(1))
    shared = plan_layout(1, devices="0")
    assert shared.notes == ("GPU 0 is reserved by the cluster 'first', too: both share its memory and its time.",)
    _, taken = reserve("second", shared)
    assert taken == {FIRST: "'first'"}


@pytest.fixture
def shared_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the locks, for all users."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        monkeypatch.setenv("AXON_NB_RUNTIME_DIR", folder)
        assert gpu_owners([FIRST]) == {}
        yield Path(folder) / "axon_nb-gpus"


def _reserve_as(user: int, ready: int, done: int) -> None:
    """Reserve the first card as another user, until `done` is closed."""
    try:
        os.setgid(user)
        os.setuid(user)
        locks = GpuLocks()
        taken = locks.reserve(None, ReserveGpus((FIRST,), "\x1b[2Jtheirs")).owners
        os.write(ready, str(dict(taken)).encode())
        os.read(done, 1)
    finally:
        os._exit(0)


@needs_root
def test_gpu_of_another_users_cluster_is_skipped_and_its_owner_named(driver: Driver, shared_folder: Path) -> None:
    (said, ready), (done, end) = os.pipe(), os.pipe()
    if not (child := os.fork()):
        os.close(end)
        _reserve_as(NOBODY, ready, done)
    assert os.read(said, 1000) == b"{}"
    theirs = f"'\\x1b[2Jtheirs' of the user {pwd.getpwuid(NOBODY).pw_name}, process {child}"
    assert plan_layout(1).notes[0] == (
        f"Skipping GPU 0 (reserved by the cluster {theirs}): pass `--devices 0` to share it."
    )
    assert GpuLocks().reserve(None, ReserveGpus((FIRST,), "ours")).owners == {FIRST: theirs}
    assert {path.name: path.stat().st_uid for path in shared_folder.iterdir()} == {
        f"{FIRST}.{NOBODY}": NOBODY,
        f"{FIRST}.{os.getuid()}": os.getuid(),
    }
    os.close(end)
    os.waitpid(child, 0)
    assert plan_layout(1).reserves == (FIRST,), "free again, and the file of the other user is left alone"
    assert (shared_folder / f"{FIRST}.{NOBODY}").exists()


def test_links_and_pipes_in_the_shared_folder_are_not_followed(shared_folder: Path, tmp_path: Path) -> None:
    assert stat.S_IMODE(shared_folder.stat().st_mode) == 0o1777
    victim = tmp_path / "victim"
    victim.write_text("as it was")
    (shared_folder / f"{FIRST}.{os.getuid()}").symlink_to(victim)
    (shared_folder / f"{FIRST}.{os.getuid() + 1}").symlink_to(victim)
    os.mkfifo(shared_folder / f"{FIRST}.{os.getuid() + 2}")
    (shared_folder / f"{FIRST}.{os.getuid() + 3}").write_text("not its owner")
    assert gpu_owners([FIRST]) == {}
    assert GpuLocks().reserve(None, ReserveGpus((FIRST,), "ours")).owners == {}
    assert victim.read_text() == "as it was"


def test_killed_cluster_gives_its_gpus_up(driver: Driver, reserve: Reserve) -> None:
    agent, _ = reserve("first", plan_layout(None))
    assert plan_layout(None).devices[0] == "cpu"
    agent.process.kill()
    assert until(lambda: dead(agent.process))
    assert plan_layout(None).visible == "0,2,3"


def test_mig_instances_are_reserved_one_by_one(driver: Driver, reserve: Reserve) -> None:
    driver.prints(A100X4, listing=MIG)
    first, second = (line.split("UUID: ")[1].rstrip(")") for line in MIG.splitlines()[2:4])
    reserve("first", plan_layout(1, devices=first))
    assert second in str(plan_layout(None).visible)
    assert first not in str(plan_layout(None).visible)
