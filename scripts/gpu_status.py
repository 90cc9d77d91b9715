"""Write the table of GPU reports into `README.md`, from the files in `docs/gpu_reports`.

`--check` writes nothing and fails if the table is out of date.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.generated_page import ROOT, write_or_check

__all__ = ["REPORTS", "TARGET", "main", "read", "render", "table"]

TARGET = ROOT / "README.md"
REPORTS = ROOT / "docs" / "gpu_reports"
_MARKED = re.compile(r"(?<=<!-- gpu reports -->\n).*?(?=<!-- end of gpu reports -->)", re.DOTALL)
_HEAD = "| GPUs | torch, NCCL | tests | drills ended by an abort | report |\n|---|---|---|---|---|\n"


def table(reports: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Render the table.

    Args:
        reports: Name and content of each report.
    """
    if not reports:
        return f"{_HEAD}| none yet | not run | not run | not run | `make gpu-report` writes one |\n"
    return _HEAD + "".join(f"| {' | '.join(_cells(name, report))} |\n" for name, report in reports)


def _cells(name: str, report: dict[str, Any]) -> list[str]:
    gpus, versions = report["gpus"], report["versions"]
    tests = report.get("tests")
    drills = [ways["abort"] for ways in report.get("drill", {}).get("table", {}).values() if "ended" in ways["abort"]]
    return [
        f"{len(gpus)} x {gpus[0]['name']}",
        f"{versions['torch']}, {versions['nccl'] or 'none'}",
        "not run" if tests is None else f"{len(tests.get('passed', []))} passed, {len(tests.get('failed', {}))} failed",
        f"{sum(bool(one['ended']) for one in drills)} of {len(drills)}" if drills else "not run",
        f"[{report['date']}](docs/gpu_reports/{name})",
    ]


def read(folder: Path = REPORTS) -> list[tuple[str, dict[str, Any]]]:
    """Return the reports, newest first, each with its file's name."""
    found = [(path.name, json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("*.json")]
    return sorted(found, key=lambda item: (item[1]["date"], item[0]), reverse=True)


def render() -> str:
    """Render `README.md` with the current table."""
    return _MARKED.sub(lambda _: table(read()), TARGET.read_text(encoding="utf-8"))


def main(argv: list[str] | None = None) -> int:
    """Write the table; return 1 if `--check` finds it out of date."""
    return write_or_check(TARGET, render, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
