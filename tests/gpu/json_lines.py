"""A pytest plugin (`-p tests.gpu.json_lines`): prints a line of JSON when a test begins and when it ends.

`scripts/gpu_box.py` reads them: ``test``, then ``outcome`` (passed, skipped, failed), ``seconds``, ``why`` and figures,
which are what the test recorded with `record_property`.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from scripts.gpu_box_parts import DONE

# Imported before pytest begins to capture what tests print.
_stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
_seconds: dict[str, float] = {}
_MAX_WHY = 3000


def _print(values: dict[str, Any]) -> None:
    # pytest's own line may have no end yet.
    print("\n" + json.dumps(values), file=_stdout, flush=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that have a result from an earlier call."""
    done = set(json.loads(os.environ.get(DONE, "[]")))
    left_out = [item for item in items if item.nodeid in done]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item.nodeid not in done]


def pytest_runtest_logstart(nodeid: str) -> None:
    """Say that a test begins: a machine that dies in it leaves its name."""
    _print({"test": nodeid})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Say how a test ended."""
    _seconds[report.nodeid] = _seconds.get(report.nodeid, 0.0) + report.duration
    if report.passed and report.when != "call":
        return
    values: dict[str, Any] = {"test": report.nodeid, "outcome": report.outcome}
    values["seconds"] = round(_seconds[report.nodeid], 1)
    if report.skipped and isinstance(report.longrepr, tuple):
        values["why"] = report.longrepr[2]
    elif report.failed:
        values["why"] = report.longreprtext[-_MAX_WHY:]
    if report.user_properties:
        values["figures"] = {str(name): value for name, value in report.user_properties}
    _print(values)
