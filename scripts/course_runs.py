"""Write `docs/course_runs.md`: how long the solved notebooks of the course take on real ranks, and how much memory.

    python -m scripts.course_runs --run               # run all, one after the other; ten minutes or more
    python -m scripts.course_runs --run 01 08         # these only
    python -m scripts.course_runs                     # write the page again from docs/course_runs.csv

`--check` only says whether the page is up to date. Run the notebooks on an idle machine: rows of the same machine are
replaced, those of others stay.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import nbformat
import psutil
from nbformat import NotebookNode

from scripts.build_course import SOURCES
from scripts.build_course import main as build
from scripts.generated_page import ROOT, write_or_check

NOTEBOOKS = sorted(path.stem for path in SOURCES.glob("[0-9]*.py"))
PAGE = ROOT / "docs" / "course_runs.md"
_TABLE = PAGE.with_suffix(".csv")
_COLUMNS = ("machine", "date", "notebook", "seconds", "peak_mib", "load", "failed")
_INTERVAL_S = 0.5
_MOST_S, _MOST_MIB = 180, 1536
_HEAD = f"""\
# How long the course takes

`python -m scripts.course_runs --run` runs the solved notebooks one after the other, each on its own ranks, and writes
this page from [course_runs.csv](course_runs.csv). Memory is the largest sum, measured every {_INTERVAL_S:g} s, of the
kernel and of all that it started; what several processes share counts once (PSS). The aim is {_MOST_S} s and
{_MOST_MIB / 1024:g} GiB for each notebook on two cores with nothing else to do. "Load" is the system's load average of
the minute before: above 0.5 or so, something else was running, too.
"""


class Run(NamedTuple):
    """A solved notebook that has run from top to bottom."""

    notebook: str
    seconds: float
    peak_mib: float
    load: float
    """The load average of the minute before it."""
    failed: str
    """The first cell that did not do what it should; empty if all did."""


def run_solved(name: str, folder: Path) -> Run:
    """Run the solved edition of a notebook in a process of its own, as a learner without a history.

    Args:
        name: Such as ``01_one_program``.
        folder: For the notebook, its result and the learner's journal.
    """
    build(["--edition", "solved", str(folder)])
    command = [sys.executable, "scripts/run_notebook.py", str(folder / f"{name}.ipynb"), "--out", str(folder / "out")]
    environment = {**os.environ, "XDG_DATA_HOME": str(folder)}
    load, began, peak = os.getloadavg()[0], time.monotonic(), 0.0
    with (folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        while process.poll() is None:
            peak = max(peak, _memory_mib(process.pid))
            time.sleep(_INTERVAL_S)
    seconds = time.monotonic() - began
    executed = folder / "out" / f"{name}.ipynb"
    failed = "" if process.returncode == 0 else (folder / f"{name}.log").read_text()[-2000:]
    return Run(name, seconds, peak, load, failed or first_wrong_cell(nbformat.read(executed, 4)))


def _memory_mib(pid: int) -> float:
    """Return the PSS of all that a process has started, its own left out."""
    total = 0
    try:
        started = psutil.Process(pid).children(recursive=True)
    except psutil.Error:  # it has just ended
        return 0.0
    for process in started:
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total / 2**20


def first_wrong_cell(notebook: NotebookNode) -> str:
    """Return the first cell that failed without being meant to, or the other way round, or whose check did not pass."""
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        is_planted = "raises-exception" in cell.metadata.get("tags", [])
        if is_planted != any(output.output_type == "error" for output in cell.outputs):
            return str(cell.source)
        if re.match(r"check\(", cell.source):
            shown = "".join(output.data["text/plain"] for output in cell.outputs if "data" in output)
            if "✓" not in shown or re.search("^  [✗·]|Not yet", shown, re.MULTILINE):
                return f"{cell.source}\n{shown}"
    return ""


def render(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the page of all runs, which have the columns of docs/course_runs.csv."""
    parts = [_HEAD]
    for machine in dict.fromkeys(row["machine"] for row in rows):
        mine = [row for row in rows if row["machine"] == machine]
        lines = [
            f"## {machine}",
            "",
            "| notebook | seconds | peak memory | load | checks | day |",
            "|---|--:|--:|--:|---|---|",
        ]
        lines += [_line(row) for row in mine]
        minutes = sum(float(row["seconds"]) for row in mine) / 60
        peak = max(float(row["peak_mib"]) for row in mine)
        lines += [
            "",
            f"{len(mine)} of {len(NOTEBOOKS)} notebooks: {minutes:.0f} minutes in all, {peak:,.0f} MiB at most.",
        ]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _line(row: Mapping[str, str]) -> str:
    seconds, peak = float(row["seconds"]), float(row["peak_mib"])
    cells = [
        row["notebook"],
        f"{seconds:.0f}{' (over)' if seconds > _MOST_S else ''}",
        f"{peak:,.0f} MiB{' (over)' if peak > _MOST_MIB else ''}",
        row["load"],
        row["failed"] or "all hold",
        row["date"],
    ]
    return f"| {' | '.join(cells)} |"


def _read() -> list[dict[str, str]]:
    if not _TABLE.exists():
        return []
    with _TABLE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _store(run: Run) -> None:
    import torch

    memory = psutil.virtual_memory().total / 2**30
    version = ".".join(platform.python_version_tuple()[:2])
    machine = (
        f"{os.cpu_count()} cores of {platform.machine()}, {memory:.0f} GiB, {platform.system()}, Python {version}, "
        f"torch {torch.__version__}"
    )
    row = {
        "machine": machine,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "notebook": run.notebook,
        "seconds": f"{run.seconds:.1f}",
        "peak_mib": f"{run.peak_mib:.0f}",
        "load": f"{run.load:.1f}",
        "failed": f"not: {run.failed.splitlines()[0]}" if run.failed else "",
    }
    others = [old for old in _read() if (old["machine"], old["notebook"]) != (machine, run.notebook)]
    with _TABLE.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, _COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(sorted([*others, row], key=lambda each: (each["machine"], each["notebook"])))


def main(argv: Sequence[str] | None = None) -> int:
    """Run notebooks, if asked to, and write the page; return 1 if a check did not pass, or the page is out of date."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--run", nargs="*", metavar="NN")
    options, rest = parser.parse_known_args(argv)
    failed = False
    for name in NOTEBOOKS if options.run is not None else ():
        if not options.run or name.partition("_")[0] in options.run:
            with tempfile.TemporaryDirectory() as folder:
                run = run_solved(name, Path(folder))
            _store(run)
            print(
                f"{name}: {run.seconds:.0f} s, {run.peak_mib:,.0f} MiB, {run.failed or 'all checks hold'}", flush=True
            )
            failed = failed or bool(run.failed)
    return write_or_check(PAGE, lambda: render(_read()), __doc__, rest) or int(failed)


if __name__ == "__main__":
    sys.exit(main())
