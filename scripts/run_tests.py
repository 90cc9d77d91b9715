"""Run the tests of a tier, or those that you name.

    scripts/test quick    # what starts no ranks
    scripts/test          # the quick tests but the longest, and one real path for each promise (tests/promises.toml)
    scripts/test all      # everything that must pass before a part is done
    scripts/test soak     # the slow ones, too; then each test that was flaky, 50 times idle and 50 times busy
    scripts/test --changed [BASE]  # like `scripts/test`, and what the difference from BASE (.ci/landed) can break
    scripts/test PATH …   # any arguments of pytest

Tiers run WORKERS groups of tests at a time (3 by default, because tests wait more than they compute). Options of pytest
may follow a tier: `scripts/test all -x --lf`. With CHANGED_LIMIT_S (no limit by default), files that a change can break
are left out, and named, once the others would take so many seconds in one process. In CI the files whose turn it is run
as well, so that every file runs at least once in TURNS landings.

Each file with a failure then runs again, alone in a fresh process; if it fails again, once more beside two busy
processes. A test that passes then is flaky: the run passes, names it in its last lines and appends it to
out/flaky.jsonl, with the evidence of its first failure in out/failures/. A test that fails each time fails the run, and
so do, at once, more than ten failures, a crashed worker and an error of collection. STRICT=1 forgives nothing.
A run that passed on a clean tree appends its commit to out/green. OUT names another folder than out.
"""

from __future__ import annotations

import compileall
import contextlib
import datetime as dt
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from scripts.changed_tests import TURNS, affordable, changed_since, landings, select, turn_of
from scripts.generated_page import ROOT
from tests.support.failures import FOLDER_VARIABLE

TIERS = {
    "quick": "quick and not slow",
    "test": "(always or promise or changed) and not slow",
    "all": "not slow",
    "soak": "",
}
REWRITTEN = re.compile(r"/tests/.*/(test_\w+|conftest)\.py$")
"""What pytest compiles in its own way."""
OUT = Path(os.environ.get("OUT", ROOT / "out"))
MAX_FAILURES = 10
REPEATS = 50
FLAKY_DAYS = 14


def main() -> int:
    """Run what the command line says, and return the exit status."""
    arguments = sys.argv[1:]
    if arguments[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    tier, options, changed = _parse(arguments)
    if not tier:
        return subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=ROOT, check=False).returncode
    began = time.monotonic()
    _compile()
    os.environ["AXON_NB_TEST_CHANGED"] = "\n".join(changed)
    folder = OUT / "failures" / dt.datetime.now().strftime("%Y%m%d-%H%M%S")
    selection = ["-m", TIERS[tier]] if TIERS[tier] else []
    parallel = ["--numprocesses", os.environ.get("WORKERS", "3"), "--dist", "loadscope", "--no-loadscope-reorder"]
    status = _pytest([*parallel, "--durations", "25", f"--maxfail={MAX_FAILURES + 1}", *selection, *options], folder)
    records = _read(folder / "failures.jsonl")
    flaky: list[dict[str, Any]] = []
    if status == 1 and tier != "soak" and not os.environ.get("STRICT") and not (why := verdict(records)):
        status, flaky = _second_pass(records, selection)
    elif status == 1 and records and tier != "soak":
        print(f"No second pass: {why if not os.environ.get('STRICT') else 'STRICT is set'}.")
    if tier == "soak":
        status = max(status, _repeat_flaky())
    _report(flaky, folder)
    if status == 0:
        _note_green(tier, time.monotonic() - began)
    elif folder.exists():
        print(f"Evidence of the failures: {folder}")
    return status


def _compile() -> None:
    """Write bytecode once: without it, hundreds of kernels, agents and ranks compile the package."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    for folder in ("axon_nb", "magics", "tests"):
        compileall.compile_dir(ROOT / folder, quiet=2, rx=REWRITTEN, workers=0)
    with ProcessPoolExecutor() as pool:
        list(pool.map(_rewrite, sorted((ROOT / "tests").rglob("test_*.py")), chunksize=8))


def _rewrite(path: Path) -> None:
    """Write the bytecode of a test in which pytest shows what an assert compared; each worker would do it for all."""
    from _pytest.assertion import AssertionState, rewrite
    from _pytest.config import get_config

    pyc = rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"
    if rewrite._read_pyc(path, pyc) is None:
        pyc.parent.mkdir(exist_ok=True)
        config = get_config()
        digest, code = rewrite._rewrite_test(path, config)
        rewrite._write_pyc(AssertionState(config, "rewrite"), code, digest, pyc)


def _parse(arguments: Sequence[str]) -> tuple[str, list[str], list[str]]:
    """Return the tier (empty: none), pytest's options and the paths that a change can break."""
    if arguments[:1] == ["--changed"]:
        named = arguments[1:2] if arguments[1:2] and not arguments[1].startswith("-") else []
        changed = changed_since(*named)
        limit_s = float(os.environ.get("CHANGED_LIMIT_S", "inf"))
        turn = turn_of(landing := landings()) if limit_s < float("inf") and os.environ.get("CI") else []
        paths, left_out = affordable(select(changed), changed, limit_s, turn)
        print(f"{len(changed)} changed files: {len(paths)} files of tests that they can break run with the fast tests.")
        if turn:
            print(f"{len(turn)} files have their turn ({landing % TURNS} of 0-{TURNS - 1}): {', '.join(turn)}.")
        if left_out:
            print(f"{len(left_out)} would take too long, until their turn or `make test-all`: {', '.join(left_out)}.")
        return "test", list(arguments[1 + len(named) :]), paths + turn
    first = arguments[0] if arguments else "test"
    return (first, list(arguments[1:]), []) if first in TIERS else ("", [], [])


def verdict(records: Sequence[dict[str, Any]]) -> str:
    """Return why the failures cannot be forgiven; empty: their files may run again."""
    tests = {record["test"] for record in records if record["kind"] == "failure"}
    for kind, reason in (("collection", "tests could not be collected"), ("crash", "a worker crashed")):
        if any(record["kind"] == kind for record in records):
            return reason
    if len(tests) > MAX_FAILURES:
        return f"more than {MAX_FAILURES} tests failed"
    return "" if files_to_repeat(records) else "the failure belongs to no file"


def files_to_repeat(records: Sequence[dict[str, Any]]) -> list[str]:
    """Return the files of the failures, in order of appearance; empty if one has none."""
    files = [record["test"].partition("::")[0] for record in records]
    return [] if "" in files else list(dict.fromkeys(files))


def _second_pass(records: Sequence[dict[str, Any]], selection: Sequence[str]) -> tuple[int, list[dict[str, Any]]]:
    """Run each file with failures again; return the exit status, and the failures of files that passed."""
    flaky: list[dict[str, Any]] = []
    broken = []
    for file in files_to_repeat(records):
        passed = ""
        for how, burners in (("alone", 0), ("beside two busy processes", 2)):
            print(f"\n== {file} again, {how}", flush=True)
            folder = OUT / "failures" / f"{dt.datetime.now():%Y%m%d-%H%M%S}-again"
            with _busy(burners):
                if _pytest([*selection, "--numprocesses", "0", file], folder) == 0:
                    passed = how
                    break
        if not passed:
            broken.append(file)
        own = [record for record in records if record["test"].partition("::")[0] == file]
        flaky += [{**record, "passed": passed} for record in own if passed]
    if broken:
        print(f"failed again: {', '.join(broken)}")
    return int(bool(broken)), flaky


def _pytest(arguments: Sequence[str], folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.failures", *arguments]
    status = subprocess.run(command, cwd=ROOT, env={**os.environ, FOLDER_VARIABLE: str(folder)}, check=False).returncode
    with contextlib.suppress(OSError):
        folder.rmdir()  # if it is empty
    return status


@contextlib.contextmanager
def _busy(number: int) -> Iterator[None]:
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def known_flaky() -> list[str]:
    """Return the tests that `tests/flaky.toml` lists."""
    return list(tomllib.loads((ROOT / "tests" / "flaky.toml").read_text(encoding="utf-8")))


def _repeat_flaky() -> int:
    """Run each test that was flaky lately many times, idle and busy; return 1 if one failed."""
    oldest = (dt.date.today() - dt.timedelta(days=FLAKY_DAYS)).isoformat()
    seen = [line["test"] for line in _read(OUT / "flaky.jsonl") if line["date"] >= oldest]
    failed = 0
    for test in dict.fromkeys([*known_flaky(), *seen]):
        for burners in (0, 6):
            with _busy(burners):
                runs = [
                    _pytest(["--numprocesses", "0", "-q", test], OUT / "failures" / "repeats") for _ in range(REPEATS)
                ]
            print(f"{test}: {sum(map(bool, runs))} of {REPEATS} failed beside {burners} busy processes")
            failed += any(runs)
    return int(bool(failed))


def _report(flaky: Sequence[dict[str, Any]], folder: Path) -> None:
    """Append flaky tests to `out/flaky.jsonl`, and show them."""
    if not flaky:
        return
    facts = {"date": dt.date.today().isoformat(), "commit": _git("rev-parse", "HEAD"), "load": os.getloadavg()[2]}
    with (OUT / "flaky.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({**facts, **record}) + "\n" for record in flaky)
    print(f"\nflaky, {len(flaky)} (evidence: {folder}, list: {OUT / 'flaky.jsonl'}):")
    for record in flaky:
        print(f"  {record['test']} passed {record['passed']}; at first: {record.get('reason', record['kind'])}")


def _note_green(tier: str, seconds: float) -> None:
    """Append to `out/green` what was proven for a commit, if the tree has no other changes."""
    if (ROOT / ".git").exists() and shutil.which("git") and not _git("status", "--porcelain"):
        OUT.mkdir(exist_ok=True)
        date = dt.datetime.now().isoformat(timespec="seconds")
        line = {"tier": tier, "commit": _git("rev-parse", "HEAD"), "date": date, "seconds": round(seconds)}
        with (OUT / "green").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def _git(*command: str) -> str:
    return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
