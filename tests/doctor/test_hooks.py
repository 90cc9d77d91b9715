"""What doctor says of private hooks: what is missing, and what is lost without it."""

from __future__ import annotations

from typing import Any

from axon_nb.doctor.installation import Answer, private_hooks

LOST = {
    "group": "rpc.client",
    "package": "ipyparallel",
    "missing": ["ipyparallel.Client._send"],
    "lost": "starts and cells are slower",
    "capability": "",
    "fix": 'Run `pip install "ipyparallel>=9.1,<10"`.',
    "upstream": "",
    "files": ["axon_nb/cluster/rpc.py"],
}
TRIED = LOST | {
    "group": "groups.install",
    "package": "torch",
    "missing": ["torch.distributed.distributed_c10d._world"],
    "capability": "rebuild",
}


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
    section = private_hooks(walked(LOST))
    lost, found, _ = section.findings
    assert (lost.label, lost.value) == ("rpc.client", "ipyparallel lacks ipyparallel.Client._send")
    assert (lost.severity, lost.message) == ("problem", "Lost: starts and cells are slower.")
    assert lost.fix == 'Run `pip install "ipyparallel>=9.1,<10"`.'
    assert found.value == "2 of 3 found (torch 2, ipyparallel 1)"
    assert section.data["missing"] == [LOST]


def test_hooks_covered_by_the_self_test_are_skipped() -> None:
    tried = private_hooks(walked(TRIED)).findings[0]
    assert tried.severity == "ok"
    assert tried.value == "torch lacks torch.distributed.distributed_c10d._world; the self-test tries it (rebuild)"


def test_failed_hook_check_reports_cause() -> None:
    (finding,) = private_hooks(Answer({"hooks": {"failure": "ValueError: odd"}})).findings
    assert finding.value == "not checked: ValueError: odd"
    (finding,) = private_hooks(Answer(failure="timed out after 5 s")).findings
    assert finding.value == "not checked: timed out after 5 s"
