"""What all tests share: private folders for Jupyter's files, reasons to skip, and no process left behind."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import shutil
import sys
import tempfile
import time
import tomllib
import uuid
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, settings

from axon_nb.cluster.launch.compatibility import wrong_numbers_mark
from scripts.changed_tests import DURATIONS, QUICK, runs_always

RUN_VARIABLE = "AXON_NB_TEST_RUN"
"""Set in the environment of this run and so of every process that it starts, however deep."""

LEFTOVER_LIMIT = 60.0
"""Seconds that processes have to end after the last test."""

SLOW_LIMIT = 900.0
"""Seconds that a slow test may take that says nothing else."""

# nbformat imports jsonschema, which would build 38 parsers with it, for a second in each worker; no test needs them.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]

settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# The same examples in each run, however slow; `--hypothesis-profile=random` tries others.
settings.load_profile("steady")

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")

MOCKED = ("tests/comm/", "tests/compat/", "tests/parallel/")
"""Of what starts ranks, tests on mock worlds do not: they are quick, too."""

WORLDS = (*MOCKED, "tests/frameworks/")
"""What runs on processes that form a group: all on the same ones, by their number."""

GROUPS = {
    "browser": ("tests/browser/",),
    "kernel": (
        *(f"tests/kernel/{folder}/" for folder in ("cells", "data", "programs", "views")),
        "tests/kernel/failures/test_failures.py",
        "tests/kernel/recovery/test_pipelines.py",
        "tests/kernel/session/test_security.py",
        "tests/kernel/session/test_settings.py",
    ),
    "script": ("tests/cluster/test_",),
    "structure": ("tests/structure/test_",),
}
"""Tests that share a server, a kernel, a script or syntax trees, by the beginning of their paths."""

_failed = pytest.StashKey[bool]()
_private_folder = pytest.StashKey[Path]()
LEFTOVERS = pytest.StashKey[dict[str, str]]()
"""Processes that the tests left running, by description, and the test in which each was started."""


def is_xdist_worker(config: pytest.Config) -> bool:
    """Whether this is one of pytest-xdist's workers, rather than the run itself."""
    return hasattr(config, "workerinput")


def pytest_configure(config: pytest.Config) -> None:
    """Point everything that reads a user's own settings at an empty folder; short, for Unix sockets live below it.

    Each of pytest-xdist's workers has folders of its own, so that none sees the clusters of another.
    """
    if not is_xdist_worker(config):
        os.environ[RUN_VARIABLE] = uuid.uuid4().hex
    gc.disable()  # until all tests are collected, nearly all of which stays
    folder = Path(tempfile.mkdtemp(prefix="axt-"))
    config.stash[_private_folder] = folder
    for variable in (
        "AXON_NB_RUNTIME_DIR",
        "IPYTHONDIR",
        "JUPYTER_CONFIG_DIR",
        "JUPYTER_DATA_DIR",
        "JUPYTER_RUNTIME_DIR",
    ):
        path = folder / variable.lower().removesuffix("_dir").replace("_", "-")
        path.mkdir(mode=0o700)
        os.environ[variable] = str(path)
    # As for every user but a new one, whose first start says what torch computes wrong.
    with contextlib.suppress(metadata.PackageNotFoundError, OSError):
        for backend in ("shm", "gloo", "nccl"):
            mark = wrong_numbers_mark(metadata.version("torch"), backend)
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()


def pytest_runtest_setup() -> None:
    """End what earlier tests shared and nobody uses any more; the memory of the machine is shared by all workers."""
    if (ranks := sys.modules.get("tests.support.ranks")) is not None:
        ranks.end_idle_worlds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Note that a test failed."""
    report = yield
    item.stash[_failed] = item.stash.get(_failed, False) or report.failed
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """After a failure, end all that tests share: the next one gets a fresh kernel, browser or cluster."""
    if item.stash.get(_failed, False):
        _end_all_shared(item.session)
    try:
        return (yield)
    except BaseException:  # a fixture failed to end: its kernel may be as busy as after a failed test
        _end_all_shared(item.session)
        raise


def _end_all_shared(session: pytest.Session) -> None:
    kernels = sys.modules.get("tests.support.kernel")
    if kernels is None:
        session._setupstate.teardown_exact(None)  # as pytest itself does after the last test
        return
    kernels.discard_all()
    try:
        session._setupstate.teardown_exact(None)
    except* kernels.DiscardedError:  # a fixture asked its kernel to clean up
        pass


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files of which the tiers `quick` and `test` run nothing: to import them takes as long as the rest."""
    if not collection_path.is_relative_to(config.rootpath):
        return None
    expression = config.option.markexpr
    names = [*QUICK, *(MOCKED if "quick" in expression else ())]
    if "promise" in expression:
        names += [*_promised_tests(), *_changed_paths()]
    nodeid = collection_path.relative_to(config.rootpath).as_posix()
    is_needed = nodeid.startswith(tuple(name.partition("::")[0] for name in names))
    is_tier = expression.startswith(("quick", "(quick", "(always"))
    return True if is_tier and collection_path.suffix == ".py" and not is_needed else None


def pytest_pycollect_makeitem(collector: pytest.Collector, name: str) -> list[pytest.Item] | None:
    """Leave out the other tests of a file that runs for its promises alone: together they are most of all tests."""
    file = collector.nodeid.partition("::")[0]
    if "promise" not in collector.config.option.markexpr or not name.startswith("test"):
        return None
    is_needed = file.startswith((*QUICK, *_changed_paths())) or f"{file}::{name}" in _promised_functions()
    return None if is_needed or file in _promised_functions() else []


@functools.cache
def _promised_functions() -> frozenset[str]:
    """The promised tests without their parameters, and the files of which all tests are."""
    return frozenset(test.partition("[")[0] for test in _promised_tests())


@functools.cache
def _promised_tests() -> frozenset[str]:
    kinds = tomllib.loads((Path(__file__).parent / "promises.toml").read_text(encoding="utf-8")).values()
    return frozenset(test for kind in kinds for tests in kind.values() for test in tests)


def _changed_paths() -> tuple[str, ...]:
    return tuple(os.environ.get("AXON_NB_TEST_CHANGED", "").split())


@pytest.hookimpl(wrapper=True)  # marks before tests are deselected, and sorts what is left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Mark the tiers of `make quick` and `make test`, and skip what this machine cannot run.

    In CI a missing browser is a failure instead.
    """
    no_gpu = pytest.mark.skip(reason="needs a CUDA device, and there is none")
    no_browser = pytest.mark.skip(reason=f"needs a browser: one of {', '.join(CHROMIUM_NAMES)} on the PATH")
    has_gpu = Path("/dev/nvidiactl").exists()
    has_browser = any(map(shutil.which, CHROMIUM_NAMES)) or bool(os.environ.get("CI"))
    promised, changed = _promised_tests(), _changed_paths()
    files = {item.nodeid.partition("::")[0] for item in items}
    if "promise" in config.option.markexpr and (
        unknown := {test for test in promised if "[" in test and test.partition("::")[0] in files}
        - {item.nodeid for item in items}
    ):
        raise pytest.UsageError(f"tests/promises.toml names tests that do not exist: {', '.join(sorted(unknown))}")
    for item in items:
        if changed and item.nodeid.startswith(changed):
            item.add_marker(pytest.mark.changed)
        mocked = item.nodeid.startswith(MOCKED) and "mock" in item.nodeid.partition("[")[2]
        if mocked or item.nodeid.startswith(QUICK):
            item.add_marker(pytest.mark.quick)
        if runs_always(item.nodeid):
            item.add_marker(pytest.mark.always)
        if promised & {item.nodeid, item.nodeid.partition("[")[0], item.nodeid.partition("::")[0]}:
            item.add_marker(pytest.mark.promise)
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_LIMIT))
        if item.get_closest_marker("gpu") and not has_gpu:
            item.add_marker(no_gpu)
        if item.get_closest_marker("browser") and not has_browser:
            item.add_marker(no_browser)
    yield
    _sort_by_group(items)
    gc.collect()
    gc.freeze()  # what was imported and collected stays: no collection in a test goes through it again
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let one worker run a group; `--dist loadgroup` does nothing with pytest 9.2 (pytest-xdist 3.8 sets `_nodeid`)."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group_of(nodeid)

    return Groups(config, log)


def _group_of(nodeid: str) -> str:
    """The tests of a file are a group, and so are those of `GROUPS`, and processes that form a world."""
    if nodeid.startswith(WORLDS) and "mock" not in nodeid.partition("[")[2]:
        return "worlds"
    shared = (name for name, beginnings in GROUPS.items() if nodeid.startswith(beginnings))
    return next(shared, nodeid.partition("::")[0])


def _sort_by_group(items: list[pytest.Item]) -> None:
    """Sort tests by group, those that take longest first, and keep the order of files and within files."""
    seconds: dict[str, float] = json.loads(DURATIONS.read_text(encoding="utf-8"))
    files = [item.nodeid.partition("::")[0] for item in items]
    tests, cost = Counter(files), Counter[str]()
    for item, file in zip(items, files, strict=True):
        cost[_group_of(item.nodeid)] += seconds.get(file, 1.0) / tests[file]
    items.sort(key=lambda item: (-cost[group := _group_of(item.nodeid)], group))


def processes_of_this_run() -> list[psutil.Process]:
    """The processes that the tests started, directly or not, and that still run.

    Without multiprocessing's fork server and resource tracker, which end when this process does.
    """
    marker = os.environ[RUN_VARIABLE]
    mine = []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            is_helper = process.ppid() == os.getpid() and "multiprocessing" in " ".join(process.cmdline())
            if process.environ().get(RUN_VARIABLE) == marker and not is_helper:
                mine.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return mine


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run, and end the process, when a process of the tests outlives them."""
    if is_xdist_worker(session.config):
        shutil.rmtree(session.config.stash[_private_folder], ignore_errors=True)
        return
    limit = time.monotonic() + LEFTOVER_LIMIT
    while (left := processes_of_this_run()) and time.monotonic() < limit:
        psutil.wait_procs(left, timeout=0.2)
    session.config.stash[LEFTOVERS] = lines = {}
    for process in left:
        try:
            test = process.environ().get("PYTEST_CURRENT_TEST", "").partition(" (")[0]
            lines[f"{process.pid}: {' '.join(process.cmdline())}"] = test
            process.kill()
        except psutil.NoSuchProcess:
            continue
    if lines:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    shutil.rmtree(session.config.stash[_private_folder], ignore_errors=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """List the processes that the tests left running."""
    if lines := config.stash.get(LEFTOVERS, {}):
        terminalreporter.section("processes left running by the tests (now killed): the run fails", red=True)
        for line, test in lines.items():
            terminalreporter.write_line(f"{line} (started in {test or 'no test'})")
