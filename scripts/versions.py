"""Run version-sensitive tests with several versions of torch and Python, and write docs/versions.md.

Each version gets an environment of its own; all other packages are as in constraints.txt (the CUDA builds run on CPUs).
Existing environments are reused. Results are kept per environment, so that runs add up to one table.

    python scripts/versions.py 2.11.0 2.15.0            # these versions of torch, with this Python
    python scripts/versions.py 2.15.0 --python python3.13 --only "make test"
    python scripts/versions.py newest                   # what pip installs, if it is newer than the tested ones
    python scripts/versions.py                          # no run: write the table from the results
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from axon_nb.records.hooks import are_tested
from axon_nb.wrong_numbers import faults

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "versions"
PAGE = ROOT / "docs" / "versions.md"

SUBJECTS: dict[str, tuple[str, ...]] = {
    "private hooks, self-test": (
        "tests/engine/test_self_test.py",
        "tests/engine/groups/test_group_hooks.py",
        "tests/engine/groups/test_nccl.py",
        "tests/engine/groups/test_native.py",
        "tests/kernel/session/test_unknown_torch.py",
        "tests/unit/records/test_versions.py",
    ),
    "wrong numbers": ("tests/engine/test_self_test.py",),
    "interrupts": ("tests/engine/test_interrupts.py", "tests/kernel/recovery/test_interrupts.py"),
    "recovery": ("tests/kernel/recovery/test_recovery.py", "tests/engine/test_release.py"),
    "deadlocks": ("tests/kernel/failures/test_waits.py",),
    "repair": ("tests/kernel/recovery/test_repair.py",),
    "attach": ("tests/kernel/session/test_attach.py",),
    "collectives": ("tests/comm/test_contract.py", "tests/comm/test_direct.py"),
    "mock worlds": ("tests/comm/test_mock.py",),
    "DDP": ("tests/parallel/data/test_ddp.py", "tests/parallel/test_hooks.py"),
    "FSDP2": (
        "tests/engine/groups/test_fsdp_reset.py",
        "tests/kernel/recovery/test_sharded_steps.py",
        "tests/parallel/data/test_fsdp.py",
    ),
    "tensor parallelism, 3-D": ("tests/parallel/test_parallelize.py", "tests/parallel/test_three_d.py"),
    "pipelines": ("tests/kernel/recovery/test_pipelines.py", "tests/parallel/pipeline/test_pipeline.py"),
    "checkpoints": ("tests/parallel/checkpoint/test_checkpoint.py",),
    "plan": (
        "tests/plan/test_communication.py",
        "tests/plan/test_communication.py",
        "tests/plan/footprint/test_memory.py",
        "tests/plan/test_schedule.py",
        "tests/plan/test_step_time.py",
    ),
    "views": (
        "tests/kernel/views/test_shards.py",
        "tests/kernel/views/test_timeline.py",
        "tests/kernel/views/test_what_if.py",
    ),
}
FUZZ = "fuzz"
_REST = "## Platforms"
TIER = "make test"
"""The tests of this tier, whatever they are about."""
NEWEST = "newest"


def main() -> int:
    """Run the requested tests and write the page; return 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("torch", nargs="*", help="versions of torch, such as 2.15.0, or newest")
    parser.add_argument("--python", default=sys.executable, help="the interpreter for the environments")
    parser.add_argument("--folder", type=Path, default=ROOT / ".versions", help="folder for the environments")
    parser.add_argument("--faults", type=int, default=200, help="number of fuzz faults per version")
    parser.add_argument("--only", default="", metavar="SUBJECT", help="only this subject, such as 'FSDP2'")
    options = parser.parse_args()
    if options.only and options.only not in {*SUBJECTS, FUZZ, TIER}:
        parser.error(f"--only must be one of {', '.join([*SUBJECTS, FUZZ, TIER])}; got {options.only!r}")
    failed = False
    for version in options.torch:
        python = environment(options.folder, version, options.python)
        if version == NEWEST and are_tested({"torch": (newest := _torch(python).split()[0])}):
            print(f"torch {newest} is the newest, and was tested")
            continue
        result = examine(python, options.faults, options.only)
        failed |= any(counts["failed"] for counts in result["subjects"].values())
    PAGE.write_text(page())
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return int(failed)


def environment(folder: Path, version: str, python: str) -> Path:
    """Return the interpreter of the environment for one torch version; create or update it."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    minor = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    place = folder / f"torch-{version}-py{minor}"
    found = place / "bin" / "python"
    if not found.exists():
        print(f"== creating {place.name}", flush=True)
        subprocess.run([python, "-m", "venv", place], check=True)
    pip = [found, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("torch==")]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        newest = ["--upgrade", "torch"] if version == NEWEST else []
        constraints.write("\n".join([*pins, *([] if newest else [f"torch=={version}"])]))
        constraints.flush()
        subprocess.run([*pip, "-c", constraints.name, "-e", f"{ROOT}[dev]", "-e", ROOT / "course", *newest], check=True)
    return found


def examine(python: Path, faults: int, only: str) -> dict[str, Any]:
    """Run the selected tests in one environment and save the results."""
    build, interpreter = _torch(python).split()
    print(f"== torch {build}, Python {interpreter}", flush=True)
    path = RESULTS / f"torch-{build.partition('+')[0]}-py{interpreter.rpartition('.')[0]}.json"
    earlier: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    kept = earlier.get("subjects", {})
    start = time.monotonic()
    subprocess.run([python, "-m", "scripts.wrong_numbers", "--record"], cwd=ROOT, env=_surroundings(python), check=True)
    if only == TIER:
        kept[TIER] = run_tier(python)
    elif only != FUZZ:
        kept |= run_tests(python, {only: SUBJECTS[only]} if only else SUBJECTS)
    if faults and only in {"", FUZZ}:
        kept[FUZZ] = run_fuzz(python, faults)
    result = {
        "torch": build,
        "python": interpreter,
        "date": dt.date.today().isoformat(),
        # Keep the time of the last complete run: that of a partial run says nothing about the whole.
        "seconds": earlier["seconds"] if only and kept.keys() - {only} else round(time.monotonic() - start),
        "subjects": kept,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return result


def _torch(python: Path) -> str:
    facts = "import torch, sys; print(torch.__version__, '%d.%d.%d' % sys.version_info[:3])"
    return subprocess.run([python, "-W", "ignore", "-c", facts], capture_output=True, text=True, check=True).stdout


def _surroundings(python: Path) -> dict[str, str]:
    return {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}


def run_tests(python: Path, subjects: dict[str, tuple[str, ...]]) -> dict[str, dict[str, int]]:
    """Run the tests; return how many of each subject passed, failed and were skipped."""
    counts = {subject: {"passed": 0, "failed": 0, "skipped": 0} for subject in subjects}
    paths = [path for group in subjects.values() for path in group]
    for file, outcome in _run(python, "-m", "not slow", *paths):
        subject = next(name for name, group in subjects.items() if file.startswith(group))
        counts[subject][outcome] += 1
    return counts


def run_tier(python: Path) -> dict[str, int]:
    """Run what `make test` runs; return how many tests passed, failed and were skipped."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for _, outcome in _run(python, "-m", "(quick or promise) and not slow", "tests"):
        counts[outcome] += 1
    return counts


def _run(python: Path, *selection: str) -> list[tuple[str, str]]:
    """The file and outcome of each test of a selection."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-p", "no:cacheprovider", "-o", "junit_family=xunit1"]
        options += ["--numprocesses", "3", "--dist", "loadfile"]
        command: list[str | Path] = [python, "-m", "pytest", *options, f"--junitxml={report}", *selection]
        status = subprocess.run(command, cwd=ROOT, env=_surroundings(python), check=False).returncode
        if not report.exists():
            raise SystemExit(f"pytest exited with status {status} and wrote no report")
        found = []
        for case in ET.parse(report).iter("testcase"):
            tags = {child.tag for child in case}
            outcome = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
            found.append((case.get("file", ""), outcome))
        return found


def run_fuzz(python: Path, faults: int) -> dict[str, int]:
    """Run the fuzz; return how many random faults live models survived."""
    command = [python, "-m", "tests.fuzz", "--faults", str(faults), "--seed", "9"]
    done = subprocess.run(command, cwd=ROOT, env=_surroundings(python), stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, flush=True)
    totals = re.search(r"^\| all \| (\d+) \|.*\| (\d+) \|$", done.stdout, re.MULTILINE)
    if totals is None:
        raise SystemExit(f"the fuzz exited with status {done.returncode} and printed no table")
    ran, failures = int(totals[1]), int(totals[2])
    return {"passed": ran - failures, "failed": failures, "skipped": 0}


def page() -> str:
    """Render the table of all saved results."""
    results = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"), key=_order)]
    lines = [
        "# Versions",
        "",
        "Tests run with these versions of torch and Python, on CPUs; `make versions` repeats them. Each column is a",
        "separate environment with the torch that pip installs (a CUDA build, except `+cpu`) and all other packages",
        "as in `constraints.txt`. Cells show the number of tests that passed, and of those that failed or were",
        "skipped. The fuzz counts random faults on live models after which every rank was bit-for-bit correct.",
        "",
        "Newer versions of torch are accepted: a self-test checks what recovery needs, and `axon-nb doctor`",
        "shows its result.",
        "",
    ]
    rows = [["torch", *(result["torch"] for result in results)], ["---"] * (len(results) + 1)]
    rows.append(["Python", *(result["python"] for result in results)])
    rows.append(["date", *(result["date"] for result in results)])
    rows.append(["seconds", *(str(result["seconds"]) for result in results)])
    rows += [
        [subject, *(_cell(result["subjects"].get(subject)) for result in results)]
        for subject in [*SUBJECTS, FUZZ, TIER]
    ]
    _, mark, rest = PAGE.read_text(encoding="utf-8").partition(_REST)  # scripts/platform_table.py writes that
    table = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, *table, "", *_wrong_numbers(), "", mark + rest])


def _wrong_numbers() -> list[str]:
    lines = [
        "## Wrong without an error",
        "",
        "What these versions of torch compute wrong and do not report. `axon-nb doctor` and `axon-nb help",
        "wrong-numbers` list what the installed one has; the first start with a new torch says how many of them its",
        "ranks can meet. The versions are those in which `scripts/wrong_numbers.py` looked for the fault; for what",
        "only GPUs show, they are those of torch's own report.",
        "",
        "| what | where | wrong in | right in | instead |",
        "| --- | --- | --- | --- | --- |",
    ]
    for one in faults():
        where = "GPUs, NCCL" if one.gpus else ", ".join(one.on).capitalize() or "everywhere"
        wrong, right = (", ".join(versions) or "none yet" for versions in (one.wrong, one.right))
        number = one.source.rpartition("/")[2]
        link = f"[{f'#{number}' if number.isdecimal() else 'source'}]({one.source})"
        what = f"{one.what[0].upper()}{one.what[1:]} ({link})"
        lines.append(f"| {what} | {where} | {wrong} | {right} | {one.instead} |")
    return lines


def _cell(counts: dict[str, int] | None) -> str:
    if counts is None:
        return "not run"
    words = [f"{counts['passed']}"]
    words += [f"**{counts['failed']} failed**"] if counts["failed"] else []
    words += [f"{counts['skipped']} skipped"] if counts["skipped"] else []
    return ", ".join(words)


def _order(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path.stem)]


if __name__ == "__main__":
    sys.exit(main())
