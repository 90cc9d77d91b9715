"""What doctor reports: checks in child processes, private hooks, and the same in a notebook."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from axon_nb.doctor.installation import Answer, Child, private_hooks, self_test, software
from axon_nb.doctor.machine import cgroup_limit
from axon_nb.doctor.report import Finding, Report, Section
from tests.support.kernel import Kernel
from tests.support.processes import ended, until

FINE = Finding("cores", "8 usable")
SMALL = Finding("/dev/shm", "64.0 MiB", "problem", "Workers fail.", "Run `docker run --shm-size=1g IMAGE`.")
LEFT = Finding("train", "2 ranks, left", "note", "It keeps memory.", "Run `axon-nb stop train`.")
LOST = [Finding(f"capability {n}", "lost", "problem", f"Without it {n}.", "Run `pip install torch`.") for n in "ab"]

CAPABILITY = {
    "name": "release",
    "label": "abort a collective that waits for a missing rank",
    "works": True,
    "reason": "",
    "lost": "a failing rank leaves the others waiting",
    "fix": 'pip install "torch>=2.8,<2.16"',
}

LOST_HOOK = {
    "group": "rpc.client",
    "package": "ipyparallel",
    "missing": ["ipyparallel.Client._send"],
    "lost": "starts and cells are slower",
    "capability": "",
    "fix": 'Run `pip install "ipyparallel>=9.1,<10"`.',
    "upstream": "",
    "files": ["axon_nb/cluster/rpc.py"],
}
TRIED = LOST_HOOK | {
    "group": "groups.install",
    "package": "torch",
    "missing": ["torch.distributed.distributed_c10d._world"],
    "capability": "rebuild",
}

NAME = f"seen{os.getpid()}"
"""Other processes of this run may have a cluster of these tests, too."""


def report(*findings: Finding) -> Report:
    return Report("axon_nb 0.1.0 doctor", (Section("host", findings),))


def test_nothing_to_fix() -> None:
    assert report(FINE).text() == "axon_nb 0.1.0 doctor: no problems\n\nhost\n  cores  8 usable"
    assert report(FINE).status == 0


def test_problems_come_first_then_notes_then_the_facts() -> None:
    text = report(LEFT, FINE, SMALL).text()
    assert text.startswith("axon_nb 0.1.0 doctor: 1 problem, 1 note\n\nPROBLEM  /dev/shm: 64.0 MiB. Workers fail.\n")
    assert "\n         fix: Run `docker run --shm-size=1g IMAGE`.\n\nnote     train: " in text
    assert text.endswith("host\n  train     note: 2 ranks, left\n  cores     8 usable\n  /dev/shm  PROBLEM: 64.0 MiB")
    assert report(SMALL).status == 1
    assert report(LEFT).status == 0


def test_shared_fix_is_shown_once() -> None:
    text = report(*LOST).text()
    assert text.count("fix: ") == 1
    assert "\nPROBLEM  capability a: lost. Without it a.\n         capability b: lost. Without it b.\n" in text


def test_lines_are_short_and_commands_unbroken() -> None:
    long = Finding("x", "word " * 60, "problem", "more " * 60, f"Run `{'a' * 150}`.")
    lines = report(long).text().splitlines()
    assert all(len(line) <= 76 or "a" * 150 in line for line in lines)


def test_every_problem_has_a_fix() -> None:
    with pytest.raises(ValueError, match="without a fix"):
        Finding("x", "broken", "problem")


def test_json_is_complete() -> None:
    content = json.loads(report(FINE, SMALL).json())
    assert (content["problems"], content["notes"]) == (1, 0)
    assert content["sections"]["host"]["findings"][1]["fix"] == SMALL.fix


def test_tightest_cgroup_limit_applies(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/user.slice/job\n")
    job = tmp_path / "user.slice" / "job"
    job.mkdir(parents=True)
    (tmp_path / "cgroup.controllers").touch()
    (job / "memory.max").write_text("max\n")
    (job / "memory.current").write_text("123\n")
    assert cgroup_limit("memory", root=tmp_path, own=own) is None
    (tmp_path / "user.slice" / "memory.max").write_text("4096\n")
    assert cgroup_limit("memory", root=tmp_path, own=own) == (4096, 0)
    (tmp_path / "user.slice" / "memory.current").write_text("1000\n")
    assert cgroup_limit("memory", root=tmp_path, own=own) == (4096, 1000)
    (job / "memory.max").write_text("2000\n")
    assert cgroup_limit("memory", root=tmp_path, own=own) == (2000, 123)


def test_cgroup_v1_limits_are_read(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("8:pids:/job\n4:cpu,memory:/\n0::/\n")
    (tmp_path / "pids" / "job").mkdir(parents=True)
    (tmp_path / "memory").mkdir()
    (tmp_path / "pids" / "job" / "pids.max").write_text("64\n")
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert cgroup_limit("pids", root=tmp_path, own=own) == (64, 0)
    assert cgroup_limit("memory", root=tmp_path, own=own) is None


def answer(code: str, *, timeout_s: float = 60.0) -> Answer:
    return Child(["-c", code], timeout_s=timeout_s).answer()


def reported(*capabilities: dict[str, object]) -> Answer:
    content = {"torch": "2.15.0+cu132", "python": "3.11.7", "seconds": 0.9, "capabilities": list(capabilities)}
    return answer(f"import json; print('a library says hello'); print(json.dumps({content!r}))")


def test_working_capabilities_are_listed() -> None:
    section = self_test(reported(CAPABILITY))
    assert section.name == "self-test of torch 2.15.0+cu132 (0.90 s)"
    (finding,) = section.findings
    assert (finding.label, finding.value, finding.severity) == (CAPABILITY["label"], "works", "ok")


def test_missing_capability_is_reported_with_consequence_and_fix() -> None:
    section = self_test(reported(CAPABILITY, CAPABILITY | {"works": False, "reason": "no attribute _resume"}))
    finding = section.findings[1]
    assert finding.severity == "problem"
    assert finding.value == "does not work (no attribute _resume)"
    assert finding.message == "Lost: a failing rank leaves the others waiting."
    assert finding.fix == 'Run `pip install "torch>=2.8,<2.16"`.'


@pytest.mark.parametrize(("version", "severity"), [("2.15.0+cu132", "ok"), ("2.99.0", "note")])
def test_torch_that_nobody_tested_is_named_with_what_to_pin(version: str, severity: str) -> None:
    build = Answer({"torch": version, "cuda": None, "hip": None, "nccl": None, "backends": ["gloo"]})
    (finding,) = [one for one in software(build).findings if one.label == "torch"]
    assert finding.severity == severity
    assert ('`pip install "torch>=2.8,<2.16"`' in finding.fix) is (severity == "note")


FAILURES = {
    "import sys; sys.exit('boom')": "boom (exit code 1)",
    "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)": "killed by SIGSEGV",
    "raise ValueError('odd torch')": "ValueError: odd torch (exit code 1)",
    "print('not { json')": "its output is not JSON",
    "print('[1, 2]')": "its output is not JSON",
    "": "its output is not JSON",
}


@pytest.mark.parametrize(("code", "failure"), FAILURES.items())
def test_failed_check_process_is_a_separate_finding(code: str, failure: str) -> None:
    (finding,) = self_test(answer(code)).findings
    assert finding.severity == "problem"
    assert finding.value == f"did not run: {failure}"
    assert finding.fix.endswith("-m axon_nb.engine.self_test` to see why.")


def test_reply_without_capabilities_is_a_failure() -> None:
    (finding,) = self_test(answer('print(\'{"torch": "2.15"}\')')).findings
    assert finding.value == "did not run: its reply lists no capabilities"


def test_missing_module_is_reported() -> None:
    missing = Child(["-m", "axon_nb.engine.no_such_thing"], timeout_s=60.0).answer()
    assert missing.failure == "No module named axon_nb.engine.no_such_thing (exit code 1)"


def test_missing_self_test_suggests_a_reinstall() -> None:
    code = "import sys; sys.exit('No module named axon_nb.engine.self_test')"
    (finding,) = self_test(answer(code)).findings
    assert finding.fix == "Reinstall axon_nb: this installation lacks `axon_nb/engine/self_test`."


def test_hung_check_is_killed_with_its_descendants() -> None:
    code = (
        "import subprocess, sys, time\n"
        "helper = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('asking', helper.pid, file=sys.stderr, flush=True)\n"
        "time.sleep(600)\n"
    )
    given = answer(code, timeout_s=3.0)
    assert given.failure.endswith("(timed out after 3 s)")
    pid = int(given.stderr.split()[-1])
    assert until(lambda: not psutil.pid_exists(pid) or ended(psutil.Process(pid)))


def test_close_kills_an_unread_check() -> None:
    child = Child(["-c", "import time; time.sleep(600)"], timeout_s=600.0)
    process = psutil.Process(child._process.pid)
    assert process.ppid() == os.getpid()
    child.close()
    assert ended(process)


def walked(*missing: dict[str, Any]) -> Answer:
    checked = ["groups.install", "groups.swap", "rpc.client"]
    return Answer(
        {"hooks": {"checked": checked, "unused": [], "unchecked": ["job.tqdm_bars"], "missing": list(missing)}}
    )


def test_present_hooks_are_counted() -> None:
    section = private_hooks(walked())
    assert [(finding.label, finding.value) for finding in section.findings] == [
        ("all", "3 of 3 found (torch 2, ipyparallel 1)"),
        ("unchecked", "1, in packages that only cells load: tqdm"),
    ]
    assert {finding.severity for finding in section.findings} == {"ok"}


def test_missing_hook_is_reported_with_consequence_and_fix() -> None:
    section = private_hooks(walked(LOST_HOOK))
    lost, found, _ = section.findings
    assert (lost.label, lost.value) == ("rpc.client", "ipyparallel lacks ipyparallel.Client._send")
    assert (lost.severity, lost.message) == ("problem", "Lost: starts and cells are slower.")
    assert lost.fix == 'Run `pip install "ipyparallel>=9.1,<10"`.'
    assert found.value == "2 of 3 found (torch 2, ipyparallel 1)"
    assert section.data["missing"] == [LOST_HOOK]


def test_hooks_covered_by_the_self_test_are_skipped() -> None:
    tried = private_hooks(walked(TRIED)).findings[0]
    assert tried.severity == "ok"
    assert tried.value == "torch lacks torch.distributed.distributed_c10d._world; the self-test tries it (rebuild)"


def test_failed_hook_check_reports_cause() -> None:
    (finding,) = private_hooks(Answer({"hooks": {"failure": "ValueError: odd"}})).findings
    assert finding.value == "not checked: ValueError: odd"
    (finding,) = private_hooks(Answer(failure="timed out after 5 s")).findings
    assert finding.value == "not checked: timed out after 5 s"


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel with a cluster of 2 ranks."""
    with Kernel(cwd=tmp_path_factory.mktemp("doctor")) as kernel:
        kernel.ok("%load_ext axon_nb")
        kernel.ok(f"%distributed start -n 2 --name {NAME}")
        yield kernel


def test_doctor_magic_uses_the_kernels_limits(kernel: Kernel) -> None:
    reply = kernel.ok("%distributed doctor")
    assert "\naxon_nb " in reply.stdout
    assert "\nsoftware\n" in reply.stdout
    assert "\nlimits of this notebook's kernel\n" in reply.stdout
    assert reply.result == ""
    assert reply.stderr == ""


def test_doctor_magic_reports_its_cluster_as_in_use(kernel: Kernel) -> None:
    content = json.loads(kernel.ok("%distributed doctor --json").stdout)
    mine = {one["label"]: one for one in content["sections"]["clusters"]["findings"]}[NAME]
    assert mine["severity"] == "ok"
    assert "2 ranks, shm" in mine["value"]
    assert "in use by a notebook" in mine["value"]


def test_doctor_magic_leaves_ranks_unchanged(kernel: Kernel) -> None:
    kernel.ok("%%distributed\nkept = rank + 40")
    kernel.ok("%distributed doctor")
    assert sorted(kernel.ok("%%distributed\nkept").lines()) == ["[rank 0] 40", "[rank 1] 41"]


def test_bad_input_is_one_sentence(kernel: Kernel) -> None:
    reply = kernel.run("%distributed doctor --jsn")
    assert reply.ename == "UsageError"
    assert reply.evalue == "%distributed doctor has no '--jsn'; did you mean --json?"
    assert "did you mean `%distributed doctor`?" in kernel.run("%distributed docter").evalue
    assert kernel.ok("%distributed doctor --help").stdout.startswith("usage: %distributed doctor ")
