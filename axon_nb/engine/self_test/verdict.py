"""The verdict of the self-test: cached for the last build, and reached only once however many ranks need it."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import ipykernel._version
import ipyparallel
import IPython
import msgspec
import torch

from axon_nb._version import __version__
from axon_nb.engine.self_test.catalog import CHECKS, is_timeout, outcome
from axon_nb.records.environment import USER_CACHE
from axon_nb.records.hooks import REGISTER, Capability, Verdict, are_tested

_TIMEOUT_S = 90.0
_FAILURE_VALID_S = 60.0
_POLL_S = 0.02
_SOURCES = ("engine/groups/*.py", "engine/self_test/*.py", "torch_api.py")


def cache_folder() -> Path:
    """Return the folder of the verdict: ``$XDG_CACHE_HOME/axon_nb/self_test``, by default below ``~/.cache``."""
    return Path(USER_CACHE.get()).expanduser() / "axon_nb" / "self_test"


@functools.cache
def build() -> str:
    """Identify what the verdict depends on: builds of torch, Python, ipykernel, IPython, ipyparallel; our hooks."""
    package = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path in [*(path for source in _SOURCES for path in sorted(package.glob(source))), REGISTER]:
        stat = path.stat()  # reading the files would take 7 ms
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    parts = (torch.version.git_version, platform.python_version(), sys.platform, __version__, *_versions().values())
    digest.update("\0".join(map(str, parts)).encode())
    return f"torch-{torch.__version__}-py{platform.python_version()}-{digest.hexdigest()[:16]}"


def _versions() -> dict[str, str]:
    return {
        "torch": torch.__version__,
        "ipykernel": ipykernel._version.__version__,
        "ipython": IPython.__version__,
        "ipyparallel": ipyparallel.__version__,
    }


def _path() -> Path:
    return cache_folder() / "verdict.json"


def cached_verdict() -> Verdict | None:
    """Return the verdict of an earlier run with the same builds; None if there is none.

    A verdict with a failure is valid for a minute, long enough for the ranks of one start: a failure may pass.
    """
    try:
        content = json.loads(_path().read_text())
        verdict = msgspec.convert(content["verdict"], Verdict)
        age_s = time.time() - _path().stat().st_mtime
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if content["build"] != build() or (verdict.lost and age_s > _FAILURE_VALID_S):
        return None
    return verdict


def run_checks(only: Sequence[str] = ()) -> Verdict:
    """Run every check, or those of these names, in processes forked from this one; save nothing.

    This process must not have run a torch operation yet.
    """
    from axon_nb.engine.self_test.runner import run

    start = time.monotonic()
    capabilities = run(only)
    return Verdict(str(torch.__version__), platform.python_version(), time.monotonic() - start, tuple(capabilities))


def run_and_save() -> Verdict:
    """Run every check as `run_checks` does, and save the verdict."""
    verdict = run_checks()
    # On a starved machine a check times out: that says nothing about versions that are known to work.
    if not (verdict.lost and are_tested(_versions()) and all(is_timeout(item.reason) for item in verdict.lost)):
        with contextlib.suppress(OSError):
            _write(_path(), json.dumps({"build": build(), "verdict": msgspec.to_builtins(verdict)}))
    return verdict


def startup_verdict() -> Verdict:
    """Return the verdict that a start relies on.

    If none is cached, tested versions are assumed to work. The test that `start_in_child` has started counts from the
    next start on, so that it does not delay the first one. Other versions wait for it.
    """
    if (cached := cached_verdict()) is not None:
        return cached
    if are_tested(_versions()):
        return Verdict(str(torch.__version__), platform.python_version(), 0.0, ())
    return current_verdict()


def _make_cache_folder() -> None:
    """Create the cache folder if its home exists: axon_nb does not create a home.

    Raises:
        OSError: there is no home, or it is not writable.
    """
    if not Path(USER_CACHE.get()).expanduser().parent.is_dir():
        raise FileNotFoundError(f"no folder for {cache_folder()}")
    cache_folder().mkdir(parents=True, exist_ok=True)


def _write(path: Path, text: str) -> None:
    _make_cache_folder()
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".", delete=False) as file:
        file.write(text)
    os.replace(file.name, path)


def start_in_child() -> None:
    """Start the test in a forked child unless a verdict is cached, and return at once.

    For a process that is about to become a rank: it has one thread and has run no torch operation.
    """
    if cached_verdict() is not None:
        return
    pid = os.fork()
    if pid == 0:
        try:
            with _locked(timeout_s=0.0) as acquired:
                if acquired and cached_verdict() is None:
                    run_and_save()
        finally:
            os._exit(0)
    threading.Thread(target=os.waitpid, args=(pid, 0), name="axon_nb-self-test", daemon=True).start()


def current_verdict(*, in_process: bool = False) -> Verdict:
    """Return the cached verdict; if there is none, run the test, in one process of this user at a time.

    Args:
        in_process: Whether this process may fork the checks itself; otherwise a fresh interpreter does.
    """
    if (cached := cached_verdict()) is not None:
        return cached
    with _locked(timeout_s=_TIMEOUT_S):
        if (cached := cached_verdict()) is not None:
            return cached
        return run_and_save() if in_process else _run_in_interpreter()


@contextlib.contextmanager
def _locked(*, timeout_s: float) -> Iterator[bool]:
    """Hold the lock of the test; yield whether it was acquired.

    Without a cache folder nothing is shared: a caller that would wait runs the test itself, others do nothing.
    """
    try:
        _make_cache_folder()
        file = (cache_folder() / "lock").open("w")
    except OSError:
        yield timeout_s > 0
        return
    with file:
        end = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < end:
                    time.sleep(_POLL_S)
                    continue
                yield False
                return
            break
        yield True


def _run_in_interpreter() -> Verdict:
    command = [sys.executable, "-m", "axon_nb.engine.self_test", "--json", "--fresh"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=Verdict)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        reason = f"the self-test did not run: {type(error).__name__}: {str(error)[:200]}"
        capabilities: tuple[Capability, ...] = tuple(outcome(check, reason) for check in CHECKS)
        return Verdict(str(torch.__version__), platform.python_version(), 0.0, capabilities)
