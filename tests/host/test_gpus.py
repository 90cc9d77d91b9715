"""GPUs from the driver: the host agent's report, the list without `nvidia-smi`, and how both are shown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from axon_nb.cluster.inspection.status import cluster_card
from axon_nb.cluster.launch.placement import plan_layout
from axon_nb.host import resources
from axon_nb.host.resources import list_gpus, unlisted_gpus
from axon_nb.records.protocol.agent import GetInfo, ReadGpus
from axon_nb.records.telemetry import ClusterInfo, GpuReport
from tests.support.agents import serve
from tests.support.nvidia_smi import build_library, needs_nvml

GIB = 1 << 30


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the fake driver library."""
    return build_library(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def driver(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A driver without `nvidia-smi`; the file that shows it."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    node = tmp_path / "nvidiactl"
    node.touch()
    return node


@pytest.fixture
def report(driver: Path) -> Iterator[GpuReport]:
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
def test_gpus_are_found_through_nvml_without_nvidia_smi(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = list_gpus([driver])
    assert [(gpu.index, gpu.name, gpu.busy) for gpu in found] == [
        (0, "NVIDIA H100 80GB HBM3", False),
        (1, "NVIDIA H100 80GB HBM3", True),
        *[(2, "NVIDIA H100 80GB HBM3 MIG 3g.40gb", False)] * 2,
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-2,GPU-0")
    assert [gpu.selector for gpu in list_gpus([driver])] == ["MIG-20", "MIG-21", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-21")
    (instance,) = list_gpus([driver])
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
