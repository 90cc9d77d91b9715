"""A pytest plugin that records each failure when it happens, with evidence: logs, processes, stacks, load.

`scripts/test` loads it and reads `failures.jsonl`; the evidence is kept in a file per failed test.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import LEFTOVERS, is_xdist_worker, processes_of_this_run

FOLDER_VARIABLE = "AXON_NB_TEST_FAILURES"
"""Environment variable: the folder for evidence and `failures.jsonl`."""
_LOG_BYTES = 20_000
"""Of each log, from its end."""
_STACKS_LIMIT_S = 10.0


def pytest_configure(config: pytest.Config) -> None:
    """Record where tests run, and what the whole run reports."""
    folder = Path(os.environ[FOLDER_VARIABLE])
    config.pluginmanager.register(Evidence(folder))
    if not is_xdist_worker(config):
        config.pluginmanager.register(Recorder(folder))


class Evidence:
    """Writes what can be seen of a failed test before its fixtures end; in the process that ran it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        """Add the path of the evidence to the report of a failure."""
        report = yield
        if report.failed:
            path = self._folder / f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', item.nodeid)[-120:]}-{report.when}.txt"
            path.write_text("\n".join(_evidence(report)), encoding="utf-8", errors="backslashreplace")
            report.user_properties.append(("evidence", str(path)))
        return report


class Recorder:
    """Appends failures to `failures.jsonl` and shows each one at once; in the process that was started."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "failures.jsonl"

    def _add(self, **facts: object) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(facts) + "\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a failed phase of a test."""
        if not report.failed:
            return
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = (crash.message if crash else str(report.longrepr)).strip().partition("\n")[0][:300]
        test = report.nodeid
        evidence = dict(report.user_properties).get("evidence", "")
        self._add(kind="failure", test=test, when=report.when, reason=reason, evidence=evidence)
        print(f"\nFAILED {test} ({report.when}): {reason}", file=sys.__stdout__, flush=True)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record an error of collection."""
        if report.failed:
            self._add(kind="collection", test=report.nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object, error: object) -> None:
        """Record a worker that ended by itself."""
        if error:
            self._add(kind="crash", test="", reason=str(error)[:300])

    def pytest_terminal_summary(self, config: pytest.Config) -> None:
        """Record processes that outlived the tests."""
        for process, test in config.stash.get(LEFTOVERS, {}).items():
            self._add(kind="leftover", test=test, reason=f"left running: {process}"[:300])


def _evidence(report: pytest.TestReport) -> Iterator[str]:
    yield f"{report.nodeid} failed in {report.when}, {time.strftime('%F %T')}"
    yield f"load {os.getloadavg()}, {psutil.virtual_memory().available >> 20} MiB available"
    yield f"PYTHONHASHSEED={os.environ.get('PYTHONHASHSEED', 'random')}"
    yield report.longreprtext
    yield from (f"-- {title}\n{text}" for title, text in report.sections)
    runtime = os.environ.get("AXON_NB_RUNTIME_DIR", "")
    mine = [process for process in processes_of_this_run() if runtime and _variable(process) == runtime]
    yield f"-- {len(mine)} processes"
    for process in mine:
        yield _describe(process)
    for path in sorted(path for path in Path(runtime).rglob("*") if path.is_file()) if runtime else ():
        if path.suffix in (".log", ".err", ".txt", ".out") or path.parent.name == "log":
            yield f"-- {path}\n{_end_of(path)}"


def _variable(process: psutil.Process) -> str:
    try:
        return process.environ().get("AXON_NB_RUNTIME_DIR", "")
    except psutil.Error:
        return ""


def _describe(process: psutil.Process) -> str:
    """A process in a line, and the Python stacks of its threads."""
    try:
        times = process.cpu_times()
        cpu_s, command = times.user + times.system, " ".join(process.cmdline())[:200]
        line = f"{process.pid} (parent {process.ppid()}) {process.status()}, {cpu_s:.1f} s of CPU time: {command}"
        dump = subprocess.run(
            ["py-spy", "dump", "--nonblocking", "--pid", str(process.pid)],
            capture_output=True,
            text=True,
            timeout=_STACKS_LIMIT_S,
            check=False,
        )
    except psutil.Error:
        return f"{process.pid} has ended"
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        return f"{line}\n  no stacks: {error}"
    return f"{line}\n{dump.stdout or dump.stderr}"


def _end_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LOG_BYTES))
            return file.read().decode(errors="replace")
    except OSError as error:
        return str(error)
