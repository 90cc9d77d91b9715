"""Run the tests that the tables in `docs/parity` name, and write to `docs/parity/runs.toml` where each has run.

    python -m scripts.parity_run    # 10 minutes on 2 cores; then `make fix` writes docs/parity.md

What this machine cannot run is skipped, and does not count as run. If a test fails, nothing is written.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

import pytest

from scripts.parity_table import RUNS, is_run, named_tests


class Recorder:
    """A pytest plugin that records where each test ran, with all its parameters as one test."""

    def __init__(self) -> None:
        self.places: dict[str, set[str]] = {}
        """By test: `where` of each of its cases."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a case: its call, or the reason why it was skipped."""
        if report.when == "call" or report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
            place = where(report.outcome, set(report.keywords), reason.removeprefix("Skipped: "))
            self.places.setdefault(report.nodeid.partition("[")[0], set()).add(place)

    def runs(self) -> dict[str, str]:
        """By test, where it ran: one line, in which a case that was skipped counts only if no other ran."""
        found = {}
        for test, places in sorted(self.places.items()):
            ran = {place for place in places if is_run(place)}
            found[test] = min(ran or places, key=len)
        return found


def where(outcome: str, markers: set[str], reason: str = "") -> str:
    """Say where a case ran: ``CPU``, ``CPU, slow tier``, ``GPU``, or ``not run`` and why.

    Args:
        outcome: The outcome that pytest reports.
        markers: Names of its marks.
        reason: Why it was skipped.
    """
    on_gpu = "gpu" in markers
    if outcome != "passed":
        return "GPU: not run" if on_gpu else f"not run: {reason}"
    return "GPU" if on_gpu else "CPU, slow tier" if "slow" in markers else "CPU"


def _write(runs: Mapping[str, str], machine: str) -> None:
    lines = ["# Where the tests that the tables name were run last. Written by `python -m scripts.parity_run`."]
    lines += [f'machine = "{machine}"', "", "[tests]"]
    lines += [f'"{test}" = "{place}"' for test, place in runs.items()]
    RUNS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _machine() -> str:
    import torch

    version = ".".join(map(str, sys.version_info[:3]))
    return f"{datetime.now(UTC):%Y-%m-%d}, Python {version}, torch {torch.__version__}, {sys.platform}"


def main(arguments: Iterable[str] = ()) -> int:
    """Run the tests; return pytest's exit status.

    Args:
        arguments: More options of pytest.
    """
    recorder = Recorder()
    status = pytest.main(["-q", *arguments, *named_tests()], plugins=[recorder])
    if status == pytest.ExitCode.OK:
        _write(recorder.runs(), _machine())
    return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
