"""Runs the checks, each in its own forked processes, with a timeout, so that a crash or a hang is a result.

The processes of a check communicate through files. The checks that need one process are here; each imports what it
tries, because an import that fails is a result, too.
"""

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
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, NoReturn

import psutil
import torch
from msgspec import Struct
from torch import nn

from axon_nb.engine.self_test.catalog import CHECKS, Check, outcome
from axon_nb.host.children import set_parent_death_signal
from axon_nb.records.hooks import Capability, missing_hooks
from axon_nb.records.ranks import name_ranks

_PEER_TIMEOUT_S = 20.0
_POLL_S = 0.002
_CHECK_TIMEOUT_S = 30.0
_PREFIX = "axon_nb-self-test-"
_STALE_S = 600.0
_HEAVY = (
    "axon_nb.engine.self_test.checks",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch._dynamo",
)
"""Modules that the checks import: once here instead of in each of their processes."""


class CheckProcess(Struct, frozen=True):
    """One process of a check."""

    DIED_ON_PURPOSE: ClassVar[int] = 77
    """Exit status after which a replacement is forked."""

    folder: Path
    """Private to the check, and shared by its processes."""
    rank: int
    num_ranks: int
    is_replacement: bool = False
    """Whether it takes the rank of a process that died."""

    @property
    def log(self) -> Path:
        """The file with what the process printed."""
        return self.folder / f"log{self.rank}"

    def die(self) -> NoReturn:
        """Exit at once, as in a crash; a replacement takes the rank."""
        os._exit(self.DIED_ON_PURPOSE)

    def fail(self, error: BaseException) -> None:
        """Record why this process fails."""
        self.note("failure", f"{type(error).__name__}: {str(error).strip()[:300]}" if str(error) else repr(error))

    def failure(self) -> str:
        """Return why the process failed; empty if it recorded nothing."""
        path = self._path("failure")
        return path.read_text() if path.exists() else ""

    def note(self, name: str, text: str = "") -> None:
        """Write a note that the other processes can wait for."""
        path = self._path(name)
        partial = path.with_name(f".{path.name}")
        partial.write_text(text)
        partial.rename(path)

    def wait_for(self, name: str, rank: int) -> str:
        """Wait for the note of another rank and return it.

        Raises:
            TimeoutError: the rank wrote none within 20 s.
        """
        path = self.folder / f"{name}{rank}"
        self.wait_until(path.exists, f"rank {rank} wrote no note {name!r}")
        return path.read_text()

    @staticmethod
    def wait_until(condition: Callable[[], bool], message: str) -> None:
        """Wait until a condition holds.

        Raises:
            TimeoutError: it did not within 20 s; `message` starts the text.
        """
        end = time.monotonic() + _PEER_TIMEOUT_S
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(f"{message} within {_PEER_TIMEOUT_S:g} s")
            time.sleep(_POLL_S)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}{self.rank}"


def _raise_if_missing(*groups: str, **objects: Any) -> None:
    if names := [name for group in groups for name in missing_hooks(group, **objects)]:
        raise AttributeError(f"missing: {', '.join(names)}")


def optimizer_steps(_: CheckProcess) -> None:
    """Find an optimizer's step on the stack."""
    from axon_nb.engine import frames

    depths: list[int] = []

    class RecordingSGD(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            depths.append(frames.step_depth(sys._getframe()))
            return super().step(closure)

    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    RecordingSGD(model.parameters(), lr=0.1).step()
    if depths != [1]:
        raise AssertionError(f"one step was counted as {depths}")


def interrupts(_: CheckProcess) -> None:
    """Leave a loop that catches everything, at a line that no `try` guards."""
    from axon_nb.engine.kernel import interrupts

    _raise_if_missing("interrupts.guarded_lines")

    def stubborn() -> None:
        while True:
            with contextlib.suppress(BaseException):
                time.sleep(0.001)

    def on_alarm(_: int, frame: FrameType | None) -> None:
        outermost = frame
        while outermost is not None and outermost.f_code is not stubborn.__code__:
            outermost = outermost.f_back
        if outermost is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            interrupts.force_interrupt(frame, outermost)

    previous = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)  # repeated, in case the first comes before the loop starts
    try:
        stubborn()
    except KeyboardInterrupt:
        pass
    finally:
        interrupts.clear_forced_interrupt()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def kernel_hooks(_: CheckProcess) -> None:
    """Find everything in an engine's kernel that axon_nb replaces."""
    from ipyparallel.engine.kernel import IPythonParallelKernel

    _raise_if_missing("kernel.cells", "kernel.subshells", kernel=IPythonParallelKernel())


def short_tracebacks(_: CheckProcess) -> None:
    """Show only the ends of a traceback of 500 calls in an engine's shell."""
    from ipyparallel.engine.kernel import IPythonParallelKernel

    from axon_nb.engine.kernel.shell import Tracebacks

    shell: Any = IPythonParallelKernel().shell
    shell.run_cell("def fall(depth): return fall(depth - 1) if depth else 1 / 0")
    _raise_if_missing("kernel.failures", "kernel.frames", "kernel.tracebacks", shell=shell)
    Tracebacks().install_bounded(shell)
    shell.run_cell("fall(500)")
    shown = "\n".join(shell._last_traceback)
    if "are not shown" not in shown or shown.count("fall") > 200:
        raise AssertionError(f"a traceback of 500 calls shows {shown.count('fall')} of them")


def sharding_views(_: CheckProcess) -> None:
    """Find what the views read from DTensor and FSDP2."""
    _raise_if_missing("sharding.placement", "sharding.gathering", "live_objects.states")


def pipeline_spans(_: CheckProcess) -> None:
    """Find what axon_nb wraps in pipelines to record their actions."""
    _raise_if_missing("parallel.pipeline_spans")


def mock_worlds(_: CheckProcess) -> None:
    """Reduce a tensor over two ranks inside this process."""
    from axon_nb.comm import World

    def work(world: Any) -> list[float]:
        tensor = torch.full((2,), world.rank() + 1.0)
        torch.distributed.all_reduce(tensor)
        return tensor.tolist()

    if (results := World.mock(2).run(work)) != [[3.0, 3.0]] * 2:
        raise AssertionError(f"a mock world returned {results}")


def simulation(_: CheckProcess) -> None:
    """Run a sharded step as one rank of a fake world, on tensors without data."""
    from torch.distributed.fsdp import fully_shard

    from axon_nb.plan.footprint import fake_world

    with fake_world.fake_world(0, 2):
        mesh = fake_world.mesh_of({"dp": 2})
        with fake_world.fake_tensors():
            model = nn.Linear(8, 8)
            fully_shard(model, mesh=mesh)
            model(torch.ones(2, 8)).sum().backward()
            weight: Any = model.weight
            if weight.grad is None or tuple(weight.to_local().shape) != (4, 8):
                raise AssertionError("a sharded step on tensors without data gave no sharded gradient")


def run(only: Collection[str] = ()) -> list[Capability]:
    """Run every check, or those of these names; return the verdicts in the order of `CHECKS`."""
    for name in _HEAVY:
        with contextlib.suppress(Exception):  # the check that needs it reports it
            importlib.import_module(name)
    _remove_stale_folders()
    with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}-") as folder:
        chosen = [check for check in CHECKS if not only or check.name in only]
        return [outcome(check, _run(check, Path(folder) / check.name)) for check in chosen]


def _remove_stale_folders() -> None:
    """Remove the folders of tests that were killed: a rank that exits takes its children along."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        number = folder.name.removeprefix(_PREFIX).partition("-")[0]
        with contextlib.suppress(OSError):
            stat = folder.lstat()
            stale = time.time() - stat.st_mtime > _STALE_S  # a container that shares the folder has other process ids
            if stale and number.isdigit() and stat.st_uid == os.getuid() and not psutil.pid_exists(int(number)):
                shutil.rmtree(folder)


def _run(check: Check, folder: Path) -> str:
    """Run a check in a new folder; return why it failed, or an empty string."""
    folder.mkdir()
    with _ranks() as pids:
        for rank in range(check.num_ranks):
            pids[_fork(check, CheckProcess(folder, rank, check.num_ranks))] = rank
        end = time.monotonic() + _CHECK_TIMEOUT_S
        while pids:
            pid, status = _next_exit(pids)
            if pid == 0:
                if time.monotonic() > end:
                    return f"timed out after {_CHECK_TIMEOUT_S:g} s on {name_ranks(pids.values())}"
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
        module = "runner" if check.num_ranks == 1 else "checks"
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
