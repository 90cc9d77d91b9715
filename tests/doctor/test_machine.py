"""Doctor on this machine, and under real limits and mounts that make it lack something."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from axon_nb.cluster.launch.placement import files_needed
from tests.doctor.command import Done, axon_nb

SECTIONS = ["software", "GPUs", "host", "network", "environment", "clusters"]


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
