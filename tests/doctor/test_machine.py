"""Doctor on this machine, under real limits and mounts, and on fake GPUs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from axon_nb.cluster.launch.placement import files_needed
from axon_nb.doctor.installation import Answer, Child
from axon_nb.doctor.machine import NVML, gpus
from axon_nb.doctor.report import Finding
from tests.doctor.command import Done, axon_nb
from tests.support.nvidia_smi import A100X4, Driver, build_library

SECTIONS = ["software", "GPUs", "host", "network", "environment", "clusters"]

CUDA = Answer({"torch": "2.13.0+cu130", "cuda": "13.0", "nccl": "2.28.9", "backends": ["gloo", "nccl"], "gpus": 4})
CPU = Answer({"torch": "2.13.0+cpu", "cuda": None, "nccl": None, "backends": ["gloo"], "gpus": 0})

needs_nvml = pytest.mark.skipif(find_spec("pynvml") is None, reason="needs nvidia-ml-py")
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
no_driver = pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a driver")


@pytest.fixture(scope="session")
def report() -> Done:
    """Of this machine, as JSON."""
    return axon_nb("doctor", "--json")


def finding(done: Done, section: str, label: str) -> dict[str, str]:
    """One finding of a report as JSON; sections by the beginning of their names."""
    sections = done.json()["sections"]
    (found,) = [content for name, content in sections.items() if name.startswith(section)]
    (one,) = [one for one in found["findings"] if one["label"] == label]
    return dict(one)


def test_every_check_ran(report: Done) -> None:
    content = report.json()
    assert [name for name in SECTIONS if name not in content["sections"]] == []
    assert not [f for s in content["sections"].values() for f in s["findings"] if "check failed" in f["message"]]
    assert report.err == ""


def test_problems_and_notes_have_fixes(report: Done) -> None:
    findings = [one for section in report.json()["sections"].values() for one in section["findings"]]
    assert {one["severity"] for one in findings} <= {"ok", "note", "problem"}
    assert all(one["fix"].endswith(".") for one in findings if one["severity"] != "ok")
    assert all(not one["fix"] and not one["message"] for one in findings if one["severity"] == "ok")


def test_exit_status_is_nonzero_on_problems(report: Done) -> None:
    assert report.code == int(report.json()["problems"] > 0)


def test_text_and_json_have_the_same_findings(report: Done) -> None:
    text = axon_nb("doctor")
    assert text.code == report.code
    first, blank, *_ = text.out.splitlines()
    assert first.startswith("axon_nb ")
    assert blank == ""
    assert text.out.count("\nPROBLEM  ") == report.json()["problems"]
    assert text.out.count("\nnote     ") == report.json()["notes"]
    assert all(f"\n{name}" in text.out for name in report.json()["sections"])
    assert text.out.isascii()


def test_torch_is_checked_in_a_subprocess(report: Done) -> None:
    code = "import sys\nfrom axon_nb.doctor.examine import examine\nexamine()\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    build = report.json()["sections"]["software"]["data"]["build"]
    asked = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True, check=True
    )
    assert build["torch"] == asked.stdout.strip()
    assert "gloo" in build["backends"]


def test_each_capability_has_its_verdict(report: Done) -> None:
    (section,) = [content for name, content in report.json()["sections"].items() if name.startswith("self-test")]
    capabilities = section["data"]["capabilities"]
    assert {"release", "rebuild", "repair"} <= {one["name"] for one in capabilities}
    assert [one["label"] for one in section["findings"]] == [one["label"] for one in capabilities]
    works = [one["severity"] == "ok" for one in section["findings"]]
    assert works == [one["works"] for one in capabilities]


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU")
def test_without_a_gpu_ranks_are_reported_to_use_cpus(report: Done) -> None:
    one = finding(report, "GPUs", "NVIDIA")
    assert "none" in one["value"]
    assert "CPUs" in one["value"] + one["message"]


def test_low_open_file_limit_is_reported_if_it_can_be_raised() -> None:
    done = axon_nb("doctor", "--json", before=("bash", "-c", 'ulimit -S -n 100; exec "$@"', "-"))
    one = finding(done, "limits", "open files")
    assert one["severity"] == "problem"
    assert one["value"].startswith("100 soft")
    assert one["fix"].startswith("Run `ulimit -n ")
    wanted = one["fix"].split("`")[1].removeprefix("ulimit -n ")
    raised = subprocess.run(
        ["bash", "-c", f"ulimit -S -n 100; ulimit -n {wanted}; ulimit -S -n"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert raised.stdout.strip() == wanted, "the fix works here"
    assert done.code == 1


def test_low_hard_open_file_limit_needs_the_administrator() -> None:
    done = axon_nb("doctor", "--json", before=("bash", "-c", 'ulimit -n 100; exec "$@"', "-"))
    one = finding(done, "limits", "open files")
    assert one["severity"] == "problem"
    assert "`ulimit -n" not in one["fix"]
    assert done.code == 1


def test_required_open_files_suffice_and_fewer_fail_early(tmp_path: Path) -> None:
    code = "import axon_nb\nc = axon_nb.start(2, devices='cpu')\nc.run('dist.barrier()', quiet=True)\nc.stop()"
    needed = files_needed(2)
    for limit, works in ((needed, True), (needed - 1, False), (64, False)):
        command = ["bash", "-c", f'ulimit -n {limit}; exec "$@"', "-", sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False, cwd=tmp_path)
        assert (done.returncode == 0) is works, done.stderr
        if not works:
            (error,) = [line for line in done.stderr.splitlines() if line.startswith("axon_nb.errors.StartError: ")]
            reported = f"2 ranks need {needed} open files, but the limit here is {limit}. "
            assert error.removeprefix("axon_nb.errors.StartError: ").startswith(reported)
            assert error.endswith(".")
            assert "Raise the hard limit" in error or "Start the container" in error


def test_small_shared_memory_is_reported() -> None:
    mount = 'mount --make-rprivate / && mount -t tmpfs -o size=16m tmpfs /dev/shm && exec "$@"'
    if subprocess.run(["unshare", "-m", "bash", "-c", mount, "-", "true"], capture_output=True, check=False).returncode:
        pytest.skip("a mount namespace of its own is not permitted here")
    done = axon_nb("doctor", before=("unshare", "-m", "bash", "-c", mount, "-"))
    assert done.code == 1
    assert "\nPROBLEM  /dev/shm: only 16.0 MiB, 16.0 MiB free. " in done.out
    assert re.search(r"^  /dev/shm +PROBLEM: only 16.0 MiB", done.out, re.MULTILINE)
    before, _, after = done.out.partition("PROBLEM  /dev/shm")
    assert "software" not in before, "what needs action comes first"
    assert "fix: " in after.partition("\n\n")[0]


def test_full_shared_memory_is_reported() -> None:
    full = (
        "mount --make-rprivate / && mount -t tmpfs -o size=2g tmpfs /dev/shm && fallocate -l 2000m /dev/shm/left "
        '&& exec "$@"'
    )
    if subprocess.run(["unshare", "-m", "bash", "-c", full, "-", "true"], capture_output=True, check=False).returncode:
        pytest.skip("a mount namespace of its own is not permitted here, or there is too little memory")
    one = finding(axon_nb("doctor", "--json", before=("unshare", "-m", "bash", "-c", full, "-")), "host", "/dev/shm")
    assert one["severity"] == "problem"
    assert one["fix"] == "Delete unused files; `ls -lS /dev/shm` lists them."


def test_torch_import_failure_is_reported(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open it')\n")
    done = axon_nb("doctor", "--json", PYTHONPATH=str(tmp_path))
    one = finding(done, "software", "torch")
    assert one["severity"] == "problem"
    assert "cannot be imported: ImportError: libcudart.so.13: cannot open it" in one["value"]
    assert done.code == 1


def test_environment_settings_are_listed() -> None:
    done = axon_nb("doctor", "--json", NCCL_DEBUG="INFO", OMP_NUM_THREADS="3", AWS_SECRET_ACCESS_KEY="hidden")
    assert finding(done, "environment", "NCCL_DEBUG")["value"] == "INFO"
    assert finding(done, "environment", "OMP_NUM_THREADS")["value"] == "3"
    assert "hidden" not in done.out


def test_only_usable_cores_count() -> None:
    first = min(os.sched_getaffinity(0))
    done = axon_nb("doctor", "--json", before=("taskset", "-c", str(first)))
    one = finding(done, "host", "cores")
    assert one["value"].startswith("1 usable ")
    assert json.loads(done.out)["sections"]["host"]["data"]["cores"] == 1
    if (os.cpu_count() or 1) > 1:
        assert one["severity"] == "note"
        assert "affinity" in one["fix"]


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
