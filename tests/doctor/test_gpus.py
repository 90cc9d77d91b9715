"""GPUs as NVML reports them: NVIDIA's own Python package on a fake of the driver's library."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from axon_nb.doctor.installation import Answer, Child
from axon_nb.doctor.machine import NVML, gpus
from axon_nb.doctor.report import Finding
from tests.support.nvidia_smi import A100X4, Driver, build_library

CUDA = Answer({"torch": "2.13.0+cu130", "cuda": "13.0", "nccl": "2.28.9", "backends": ["gloo", "nccl"], "gpus": 4})
CPU = Answer({"torch": "2.13.0+cpu", "cuda": None, "nccl": None, "backends": ["gloo"], "gpus": 0})

needs_nvml = pytest.mark.skipif(find_spec("pynvml") is None, reason="needs nvidia-ml-py")
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
no_driver = pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a driver")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the library."""
    return build_library(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """`nvidia-smi`, which lists four cards."""
    driver = Driver(tmp_path, monkeypatch)
    driver.prints(A100X4)
    return driver


def ask(monkeypatch: pytest.MonkeyPatch, library: Path | None = None, limit_s: float = 60.0, **env: str) -> Answer:
    """What NVML reports."""
    if library is not None:
        monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    return Child(NVML, timeout_s=limit_s).answer()


def by_label(findings: tuple[Finding, ...]) -> dict[str, Finding]:
    return {one.label: one for one in reversed(findings)}


@needs_nvml
@needs_compiler
def test_memory_processes_and_instances_of_each_gpu(
    library: Path, smi: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = os.getpid()
    section = gpus(ask(monkeypatch, library, FAKE_NVML_PID=str(user)), CUDA, {})
    found = by_label(section.findings)
    assert found["driver"].value == "580.95.05 (CUDA up to 13.0)"
    assert found["NCCL"].value == "2.28.9"
    assert found["GPU 0"] == Finding("GPU 0", "NVIDIA H100 80GB HBM3, 1.00 MiB of 80.0 GiB used")
    busy = found["GPU 1"]
    assert busy.severity == "note"
    assert busy.value.startswith("NVIDIA H100 80GB HBM3, 70.0 GiB of 80.0 GiB used by ")
    assert busy.value.endswith(f" (pid {user}, 69.0 GiB)")
    assert "`%distributed start --devices 1`" in busy.fix
    cut = found["GPU 2"]
    assert "MIG on with 2 instances" in cut.value
    assert "`nvidia-smi -i 2 -mig 0`" in cut.fix
    instances = [one.value for one in section.findings if one.label == "GPU 2 MIG"]
    assert instances == [
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb, 1.00 MiB of 40.0 GiB used, MIG-20",
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb, 1.00 MiB of 40.0 GiB used, MIG-21",
    ]
    assert found["GPU 3"].severity == "problem"
    assert found["GPU 3"].value == "GPU is lost"


@needs_nvml
@needs_compiler
def test_gpu_used_by_our_ranks_is_not_reported(library: Path, smi: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = ask(monkeypatch, library, FAKE_NVML_PID="4242")
    card = by_label(gpus(nvml, CUDA, {4242: "rank 1 of digits"}).findings)["GPU 1"]
    assert card.severity == "ok"
    assert card.value.endswith("used by rank 1 of digits (pid 4242, 69.0 GiB)")


@needs_nvml
@needs_compiler
def test_torch_without_cuda_is_reported(library: Path, smi: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = by_label(gpus(ask(monkeypatch, library), CPU, {}).findings)["torch"]
    assert torch.severity == "problem"
    assert torch.fix == "Install a build of torch for CUDA 13.0 or older, then restart the kernel."


@needs_nvml
@needs_compiler
def test_driver_too_old_for_torch_is_reported(library: Path, smi: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = "UserWarning: CUDA initialization: The NVIDIA driver on your system is too old (found version 12020).\n"
    build = Answer(CUDA.content | {"gpus": 0}, stderr=stderr)
    torch = by_label(gpus(ask(monkeypatch, library), build, {}).findings)["torch"]
    assert torch.severity == "problem"
    assert "too old" in torch.value
    assert torch.fix.startswith("Update the NVIDIA driver")


@needs_nvml
@needs_compiler
def test_missing_nvidia_smi_is_reported(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvml = ask(monkeypatch, library)
    monkeypatch.setenv("PATH", str(tmp_path))
    program = by_label(gpus(nvml, CUDA, {}).findings)["nvidia-smi"]
    assert (program.severity, program.value) == ("problem", "not on the PATH")


@needs_nvml
@needs_compiler
@no_driver
def test_driver_updated_while_in_use_suggests_a_restart(
    library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nvml = ask(monkeypatch, library, FAKE_NVML_INIT="18")
    assert "mismatch" in nvml.content["error"].lower()
    (one,) = gpus(nvml, CUDA, {}).findings
    assert one.severity == "note"
    assert one.fix.startswith("Restart the machine")


@needs_nvml
@needs_compiler
@no_driver
def test_hung_driver_times_out(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = ask(monkeypatch, library, limit_s=3.0, FAKE_NVML_INIT="hang")
    (one,) = gpus(nvml, CPU, {}).findings
    assert "timed out after 3 s" in one.value


def test_without_nvml_gpus_come_from_nvidia_smi(smi: Driver) -> None:
    found = by_label(gpus(Answer({"package": False, "gpus": []}), CUDA, {}).findings)
    assert found["GPU 2"].value == "NVIDIA A100-SXM4-80GB, 4.00 MiB of 80.0 GiB used"
    assert found["nvidia-ml-py"].severity == "note"
    assert found["nvidia-ml-py"].fix.endswith(" -m pip install nvidia-ml-py`.")


def test_gpus_hidden_by_the_user_are_reported(smi: Driver) -> None:
    smi.shows("")
    card = {"index": 0, "name": "NVIDIA H100", "uuid": "GPU-0", "total_bytes": 80 << 30, "used_bytes": 0}
    card |= {"exclusive": False, "mig": False, "instances": [], "processes": []}
    nvml = Answer({"package": True, "driver": "580", "cuda": "13.0", "gpus": [card]})
    found = by_label(gpus(nvml, Answer(CUDA.content | {"gpus": 0}), {}).findings)
    assert found["visible"].severity == "note"
    assert found["visible"].fix == "Unset CUDA_VISIBLE_DEVICES before you start Jupyter."


@no_driver
def test_real_check_process_works_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.modules.get("pynvml")  # torch imports it
    nvml = ask(monkeypatch)
    assert nvml.content["gpus"] == []
    assert nvml.content["package"] is (find_spec("pynvml") is not None)
    (one,) = gpus(nvml, CPU, {}).findings
    assert "none" in one.value
    assert sys.modules.get("pynvml") is before


@pytest.mark.parametrize(("version", "severity"), [("2.25.1", "note"), ("2.28.8", "note"), ("2.28.9", "ok")])
def test_nccl_version_with_hanging_abort_is_reported(smi: Driver, version: str, severity: str) -> None:
    found = by_label(gpus(Answer({"package": False}), Answer(CUDA.content | {"nccl": version}), {}).findings)
    assert (found["NCCL"].value, found["NCCL"].severity) == (version, severity)
