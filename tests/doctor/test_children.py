"""Checks in child processes: successful, missing, crashed, hung, or with invalid output; all real processes."""

from __future__ import annotations

import os

import psutil
import pytest

from axon_nb.doctor.installation import Answer, Child, self_test, software
from tests.support.processes import ended, until

CAPABILITY = {
    "name": "release",
    "label": "abort a collective that waits for a missing rank",
    "works": True,
    "reason": "",
    "lost": "a failing rank leaves the others waiting",
    "fix": 'pip install "torch>=2.8,<2.16"',
}


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
