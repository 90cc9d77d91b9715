"""GPUs of the host: which there are, which of them ranks get, and who holds them."""

from __future__ import annotations

import os
import pwd
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from axon_nb.cluster.inspection.status import cluster_card
from axon_nb.cluster.launch.placement import Layout, plan_layout
from axon_nb.errors import UsageError
from axon_nb.host import resources
from axon_nb.host.resources import Gpu, GpuLocks, gpu_owners, list_gpus, mig_instances, unlisted_gpus, visible_gpus
from axon_nb.records.protocol.agent import GetInfo, ReadGpus, ReserveGpus
from axon_nb.records.telemetry import ClusterInfo, GpuReport
from tests.support.agents import Served, serve
from tests.support.nvidia_smi import A100X4, MIG, MIG_R450, MIXED, Driver, build_library, needs_nvml
from tests.support.processes import ended, until

NOBODY = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
FIRST_GPU = "GPU-5c0e8f1a-3f6f-1b5e-9d0c-6a1f1d9a7b10"
Reserve = Callable[[str, Layout], tuple[Served, dict[str, str]]]

GIB = 1 << 30


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A machine with four cards."""
    driver = Driver(tmp_path, monkeypatch)
    driver.prints(A100X4)
    return driver


def test_all_gpus_are_listed_with_their_memory(driver: Driver) -> None:
    gpus = list_gpus()
    assert [gpu.index for gpu in gpus] == [0, 1, 2, 3]
    assert {gpu.name for gpu in gpus} == {"NVIDIA A100-SXM4-80GB"}
    assert {gpu.total_bytes for gpu in gpus} == {80 << 30}
    assert [gpu.used_bytes >> 20 for gpu in gpus] == [4, 79211, 4, 512]


def test_gpu_is_busy_above_half_a_gib_of_memory(driver: Driver) -> None:
    assert [gpu.busy for gpu in list_gpus()] == [False, True, False, False]


VISIBLE = [
    ("0,1,2,3", [0, 1, 2, 3]),
    ("3,1", [3, 1]),
    (" 2 , 0 ", [2, 0]),
    ("2", [2]),
    ("", []),
    ("-1", []),
    ("0,-1,1", [0]),
    ("1,7,2", [1]),
    ("one", []),
    ("GPU-f0e1d2c3-b4a5-9687-7869-5a4b3c2d1e0f,GPU-5c0e8f1a-3f6f-1b5e-9d0c-6a1f1d9a7b10", [3, 0]),
    ("GPU-8d2b", [1]),
    ("GPU-f0e1,GPU-5c,GPU-00", [3, 0]),
    ("GPU-00000000", []),
    ("MIG-8d2b6a44-7c1e-4f0b-8a3a-2b9e0c4d5f21", []),
    ("2,GPU-8d2b,0", [2, 1, 0]),
    ("0,GPU-none,1", [0]),
]


@pytest.mark.parametrize(("visible", "indices"), VISIBLE)
def test_cuda_visible_devices_order_is_respected(driver: Driver, visible: str, indices: list[int]) -> None:
    driver.shows(visible)
    assert [gpu.index for gpu in list_gpus()] == indices


@pytest.mark.parametrize("visible", ["1,1", "2,0,2", "GPU-8d2b,GPU-5c,GPU-8d2b6a44", "GPU-8d", "GPU-"])
def test_duplicate_or_ambiguous_entry_hides_all_gpus_as_in_cuda(driver: Driver, visible: str) -> None:
    driver.shows(visible)
    assert list_gpus() == []


FIRST, SECOND, OTHER = list(mig_instances(MIG.splitlines()))
BY_PARENT = "MIG-GPU-8d2b6a44-7c1e-4f0b-8a3a-2b9e0c4d5f21/1/0"
INSTANCES = [
    (FIRST, [(1, FIRST)]),
    (SECOND, [(1, SECOND)]),
    (OTHER, [(3, OTHER)]),
    (f" {OTHER} ", [(3, OTHER)]),
    (f"{SECOND},{OTHER}", [(1, SECOND), (3, OTHER)]),
    (f"{SECOND},0", [(1, SECOND), (0, "")]),
    (f"{FIRST},{FIRST}", []),
    (f"0,{FIRST},2", [(0, ""), (1, FIRST), (2, "")]),
    (f"MIG-none,{FIRST}", []),
    (FIRST[:12], []),
    ("MIG-", []),
    (BY_PARENT, [(1, BY_PARENT)]),
    ("MIG-GPU-5c0e8f1a-3f6f-1b5e-9d0c-6a1f1d9a7b10/1/0", []),
    ("MIG-GPU-8d2b6a44/1/0", []),
    ("MIG-GPU-8d2b6a44-7c1e-4f0b-8a3a-2b9e0c4d5f21", []),
    ("GPU-8d2b", [(1, FIRST), (1, SECOND)]),
    ("2,3", [(2, ""), (3, OTHER)]),
]
"""A value, and the number of each card with the instance that is used of it."""


@pytest.mark.parametrize(("visible", "expected"), INSTANCES)
def test_mig_instance_resolves_to_its_gpu(driver: Driver, visible: str, expected: list[tuple[int, str]]) -> None:
    driver.prints(A100X4, listing=MIG)
    driver.shows(visible)
    gpus = list_gpus()
    assert [(gpu.index, gpu.mig) for gpu in gpus] == expected
    assert [gpu.selector for gpu in gpus] == [mig or str(index) for index, mig in expected]
    assert not any(gpu.busy for gpu in gpus if gpu.mig), "what others use of the card is not the instance's"


def test_mig_instance_has_its_profile_name(driver: Driver) -> None:
    driver.prints(A100X4, listing=MIG)
    driver.shows(SECOND)
    assert [gpu.name for gpu in list_gpus()] == ["NVIDIA A100-SXM4-80GB MIG 1c.3g.40gb"]


def test_older_drivers_mig_instances_keep_listed_numbers() -> None:
    card = "GPU-5c0e8f1a-3f6f-1b5e-9d0c-6a1f1d9a7b10"
    cards, instances = {card: Gpu(0, "A100-SXM4-80GB", 80 << 30, 0)}, mig_instances(MIG_R450.splitlines())
    assert [gpu.mig for gpu in visible_gpus(f"MIG-{card}/2/0", cards, instances)] == [f"MIG-{card}/2/0"]
    assert visible_gpus(f"MIG-{card}/3/0", cards, instances) == []


def test_unlisted_mig_instances_are_ignored(driver: Driver) -> None:
    driver.shows(FIRST)
    assert list_gpus() == []


def test_malformed_lines_are_parsed_or_skipped(driver: Driver) -> None:
    driver.prints(MIXED)
    gpus = list_gpus()
    assert [(gpu.index, gpu.name) for gpu in gpus] == [(0, "NVIDIA GB10"), (1, "NVIDIA RTX A6000, Engineering Sample")]
    assert (gpus[0].total_bytes, gpus[0].used_bytes, gpus[0].busy) == (0, 0, False)
    assert gpus[1].total_bytes == 49140 << 20


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", 0),
        ("No devices were found\n", 0),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", 9),
        (A100X4, 15),
    ],
    ids=["nothing", "no devices", "no driver", "failed half-way"],
)
def test_unresponsive_driver_means_no_gpus(driver: Driver, text: str, code: int) -> None:
    driver.prints(text, code=code)
    assert list_gpus() == []


def test_missing_nvidia_smi_means_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list_gpus() == []


def test_failing_nvidia_smi_means_no_gpus(driver: Driver, tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/nowhere/at/all\n")
    assert list_gpus() == []


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
    assert first.reserves == (FIRST_GPU,), "one rank needs one of the three free cards"
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
    assert taken == {FIRST_GPU: "'first'"}


@pytest.fixture
def shared_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the locks, for all users."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        monkeypatch.setenv("AXON_NB_RUNTIME_DIR", folder)
        assert gpu_owners([FIRST_GPU]) == {}
        yield Path(folder) / "axon_nb-gpus"


def _reserve_as(user: int, ready: int, done: int) -> None:
    """Reserve the first card as another user, until `done` is closed."""
    try:
        os.setgid(user)
        os.setuid(user)
        locks = GpuLocks()
        taken = locks.reserve(None, ReserveGpus((FIRST_GPU,), "\x1b[2Jtheirs")).owners
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
    assert GpuLocks().reserve(None, ReserveGpus((FIRST_GPU,), "ours")).owners == {FIRST_GPU: theirs}
    assert {path.name: path.stat().st_uid for path in shared_folder.iterdir()} == {
        f"{FIRST_GPU}.{NOBODY}": NOBODY,
        f"{FIRST_GPU}.{os.getuid()}": os.getuid(),
    }
    os.close(end)
    os.waitpid(child, 0)
    assert plan_layout(1).reserves == (FIRST_GPU,), "free again, and the file of the other user is left alone"
    assert (shared_folder / f"{FIRST_GPU}.{NOBODY}").exists()


def test_links_and_pipes_in_the_shared_folder_are_not_followed(shared_folder: Path, tmp_path: Path) -> None:
    assert stat.S_IMODE(shared_folder.stat().st_mode) == 0o1777
    victim = tmp_path / "victim"
    victim.write_text("as it was")
    (shared_folder / f"{FIRST_GPU}.{os.getuid()}").symlink_to(victim)
    (shared_folder / f"{FIRST_GPU}.{os.getuid() + 1}").symlink_to(victim)
    os.mkfifo(shared_folder / f"{FIRST_GPU}.{os.getuid() + 2}")
    (shared_folder / f"{FIRST_GPU}.{os.getuid() + 3}").write_text("not its owner")
    assert gpu_owners([FIRST_GPU]) == {}
    assert GpuLocks().reserve(None, ReserveGpus((FIRST_GPU,), "ours")).owners == {}
    assert victim.read_text() == "as it was"


def test_killed_cluster_gives_its_gpus_up(driver: Driver, reserve: Reserve) -> None:
    agent, _ = reserve("first", plan_layout(None))
    assert plan_layout(None).devices[0] == "cpu"
    agent.process.kill()
    assert until(lambda: ended(agent.process))
    assert plan_layout(None).visible == "0,2,3"


def test_mig_instances_are_reserved_one_by_one(driver: Driver, reserve: Reserve) -> None:
    driver.prints(A100X4, listing=MIG)
    first, second = (line.split("UUID: ")[1].rstrip(")") for line in MIG.splitlines()[2:4])
    reserve("first", plan_layout(1, devices=first))
    assert second in str(plan_layout(None).visible)
    assert first not in str(plan_layout(None).visible)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the fake driver library."""
    return build_library(tmp_path_factory.mktemp("bare_driver"))


@pytest.fixture
def bare_driver(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A driver without `nvidia-smi`; the file that shows it."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    node = tmp_path / "nvidiactl"
    node.touch()
    return node


@pytest.fixture
def report(bare_driver: Path) -> Iterator[GpuReport]:
    """What an agent reports, which goes on serving meanwhile."""
    served = serve(entry="", controller=[], owner="the tests")
    try:
        waiting = served.client.send(ReadGpus())
        served.client.call(GetInfo())
        waiting.result(60)
        yield served.client.call(ReadGpus())
    finally:
        served.end()


@needs_nvml
def test_agent_reports_memory_load_temperature_and_power(report: GpuReport) -> None:
    free, used, cut, *instances = report.gpus
    assert (used.index, used.uuid, used.name) == (1, "GPU-1", "NVIDIA H100 80GB HBM3")
    assert (used.used_bytes, used.total_bytes) == (70 * GIB, 80 * GIB)
    assert (used.busy_percent, used.temperature_c, used.power_w) == (97, 41, 70.5)
    assert free.busy_percent == 0
    assert cut.power_w is None
    assert [(one.index, one.uuid, one.total_bytes) for one in instances] == [
        (2, "MIG-20", 40 * GIB),
        (2, "MIG-21", 40 * GIB),
    ]
    assert report.problem == "GPU 3: GPU is lost"
    info = ClusterInfo(
        name="c", backend="nccl", host="h", num_ranks=0, running=True, engines="axon", ranks=(), gpus=(used, cut)
    )
    for text in cluster_card(info).values():
        assert "GPU 1 (NVIDIA H100 80GB HBM3): 70.0 GiB of 80.0 GiB used, 97 % busy, 41 °C, 70 W" in text
        assert "GPU 2 (NVIDIA H100 80GB HBM3): 1.00 MiB of 80.0 GiB used, 0 % busy, 42 °C" in text


def test_agent_without_driver_reports_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a driver")
    served = serve(entry="", controller=[], owner="the tests")
    try:
        assert served.client.call(ReadGpus()).gpus == ()
        assert served.process.environ()["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"  # or it could not fork
    finally:
        served.end()


@needs_nvml
def test_gpus_are_found_through_nvml_without_nvidia_smi(bare_driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = list_gpus([bare_driver])
    assert [(gpu.index, gpu.name, gpu.busy) for gpu in found] == [
        (0, "NVIDIA H100 80GB HBM3", False),
        (1, "NVIDIA H100 80GB HBM3", True),
        *[(2, "NVIDIA H100 80GB HBM3 MIG 3g.40gb", False)] * 2,
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-2,GPU-0")
    assert [gpu.selector for gpu in list_gpus([bare_driver])] == ["MIG-20", "MIG-21", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-21")
    (instance,) = list_gpus([bare_driver])
    assert (instance.index, instance.selector, instance.name) == (2, "MIG-21", "NVIDIA H100 80GB HBM3 MIG 3g.40gb")


def test_driver_with_unlistable_gpus_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a driver")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    node = tmp_path / "nvidiactl"
    assert unlisted_gpus([node]) == []
    node.touch()
    assert unlisted_gpus([node]) == [str(node)]
    monkeypatch.setattr(resources.unlisted_gpus, "__defaults__", ([node],))
    layout = plan_layout(2)
    (note,) = layout.notes
    assert layout.visible == ""  # libraries would compute on it
    assert note == (
        f"There is a GPU driver ({node}), but neither nvidia-smi nor nvidia-ml-py lists a GPU: the ranks use CPUs. "
        "Run `%distributed doctor` to see why."
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert unlisted_gpus([node]) == []
