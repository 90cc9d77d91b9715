"""Runs the checks: each in its own forked processes, with a timeout, so that a crash or a hang is a result."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Collection, Iterator
from pathlib import Path

import psutil

from axon_nb.engine.self_test.catalog import CHECKS, Check, failed, passed
from axon_nb.engine.self_test.process import CheckProcess
from axon_nb.host.children import set_parent_death_signal
from axon_nb.records.compatibility import Capability
from axon_nb.records.ranks import name_ranks

_TIMEOUT_S = 30.0
_POLL_S = 0.002
_PREFIX = "axon_nb-self-test-"
_STALE_S = 600.0
_HEAVY = (
    "axon_nb.engine.self_test.wrapper_checks",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch._dynamo",
)
"""Modules that the checks import: once here instead of in each of their processes."""


def run(only: Collection[str] = ()) -> list[Capability]:
    """Run every check, or those of these names; return the verdicts in the order of `CHECKS`."""
    for name in _HEAVY:
        with contextlib.suppress(Exception):  # the check that needs it reports it
            importlib.import_module(name)
    _remove_stale_folders()
    with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}-") as folder:
        return [_verdict(check, Path(folder) / check.name) for check in CHECKS if not only or check.name in only]


def _remove_stale_folders() -> None:
    """Remove the folders of tests that were killed: a rank that exits takes its children along."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        number = folder.name.removeprefix(_PREFIX).partition("-")[0]
        with contextlib.suppress(OSError):
            stat = folder.lstat()
            stale = time.time() - stat.st_mtime > _STALE_S  # a container that shares the folder has other process ids
            if stale and number.isdigit() and stat.st_uid == os.getuid() and not psutil.pid_exists(int(number)):
                shutil.rmtree(folder)


def _verdict(check: Check, folder: Path) -> Capability:
    folder.mkdir()
    reason = _run(check, folder)
    return failed(check, reason) if reason else passed(check)


def _run(check: Check, folder: Path) -> str:
    """Run a check; return why it failed, or an empty string."""
    with _ranks() as pids:
        for rank in range(check.num_ranks):
            pids[_fork(check, CheckProcess(folder, rank, check.num_ranks))] = rank
        end = time.monotonic() + _TIMEOUT_S
        while pids:
            pid, status = _next_exit(pids)
            if pid == 0:
                if time.monotonic() > end:
                    return f"timed out after {_TIMEOUT_S:g} s on {name_ranks(pids.values())}"
                time.sleep(_POLL_S)
                continue
            rank = pids.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            process = CheckProcess(folder, rank, check.num_ranks)
            if code == CheckProcess.DIED_ON_PURPOSE:
                pids[_fork(check, CheckProcess(folder, rank, check.num_ranks, is_replacement=True))] = rank
            elif code < 0:
                return f"rank {rank} was killed by {signal.Signals(-code).name}"
            elif code:
                return process.failure() or f"rank {rank} exited with status {code}"
    return ""


@contextlib.contextmanager
def _ranks() -> Iterator[dict[int, int]]:
    """Yield the ranks by pid; kill those that still run at the end."""
    pids: dict[int, int] = {}
    try:
        yield pids
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _next_exit(pids: dict[int, int]) -> tuple[int, int]:
    for pid in pids:
        exited, status = os.waitpid(pid, os.WNOHANG)
        if exited:
            return exited, status
    return 0, 0


def _fork(check: Check, process: CheckProcess) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        set_parent_death_signal(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        _redirect_output(process)
        module = "single_checks" if check.num_ranks == 1 else check.module
        getattr(importlib.import_module(f"axon_nb.engine.self_test.{module}"), check.name)(process)
        code = 0
    except BaseException as error:
        process.fail(error)
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)  # a closed Gloo group cannot be freed


def _redirect_output(process: CheckProcess) -> None:
    """Redirect what the check and torch print to a file: the engine's output belongs to cells."""
    null = os.open(os.devnull, os.O_RDONLY)
    out = os.open(process.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for source, target in ((null, 0), (out, 1), (out, 2)):
        os.dup2(source, target)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
