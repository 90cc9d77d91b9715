"""Write what the GPU reports in `docs/gpu_reports` say into `README.md` and `docs/gpu.md`.

`--check` writes nothing and fails if a page is out of date; `--add FILE` first copies a report of `scripts/gpu_box.py`
into the folder, named by date and GPU.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.generated_page import ROOT, write_or_check

REPORTS = ROOT / "docs" / "gpu_reports"
_MARKED = re.compile(r"(?<=<!-- gpu reports -->\n).*?(?=<!-- end of gpu reports -->)", re.DOTALL)
_HEAD = "| GPUs | torch, NCCL | tests | drills ended by an abort | report |\n|---|---|---|---|---|\n"
_PARTS_HEAD = "| part | passed | failed | skipped or not run | seconds |\n|---|---|---|---|---|\n"

Report = dict[str, Any]


def table(reports: Sequence[tuple[str, Report]]) -> str:
    """Render the table of reports.

    Args:
        reports: Name and content of each report.
    """
    if not any(report["gpus"] for _, report in reports):
        none = "| none yet | not run | not run | not run | `make gpu-report` writes one |\n"
        return _HEAD + none + "".join(_row(name, report) for name, report in reports)
    return _HEAD + "".join(_row(name, report) for name, report in reports)


def _row(name: str, report: Report) -> str:
    gpus, versions = report["gpus"], report["versions"]
    counts = [_counts(items) for part, items in report["parts"].items() if "drill" not in part]
    passed, failed = (sum(one[column] for one in counts) for column in (0, 1))
    drills = [drill["abort"] for drill in _drills(report) if "ended" in drill.get("abort", {})]
    cells = [
        f"{len(gpus)} x {gpus[0]['name']}" if gpus else "no GPU (imitation)",
        f"{versions['torch']}, {versions['nccl'] or 'none'}",
        f"{passed} passed, {failed} failed",
        f"{sum(bool(one['ended']) for one in drills)} of {len(drills)}" if drills else "not run",
        f"[{report['date']}](docs/gpu_reports/{name})",
    ]
    return f"| {' | '.join(cells)} |\n"


def _drills(report: Report) -> list[dict[str, Any]]:
    items = [item for part, found in report["parts"].items() if "drill" in part for item in found.values()]
    return [ways for item in items for ways in item.get("figures", {}).get("table", {}).values()]


def _counts(items: dict[str, Any]) -> tuple[int, int, int, float]:
    """Return how many passed, failed and did not run, and the seconds; an item without tests counts as one."""
    outcomes = []
    for item in items.values():
        tests = [str(test.get("outcome")) for test in item.get("tests", {}).values()]
        own = str(item.get("outcome"))
        outcomes += (
            tests if tests and (own == "passed" or any(one.startswith("failed") for one in tests)) else [*tests, own]
        )
    passed = outcomes.count("passed")
    failed = sum(outcome.startswith("failed") for outcome in outcomes)
    return passed, failed, len(outcomes) - passed - failed, sum(item.get("seconds", 0) for item in items.values())


def parts_table(report: Report) -> str:
    """Render what became of each part."""
    rows = []
    for part, items in report["parts"].items():
        passed, failed, rest, seconds = _counts(items)
        rows.append(f"| {part} | {passed} | {failed} | {rest} | {seconds:.0f} |\n")
    return _PARTS_HEAD + "".join(rows)


def read(folder: Path = REPORTS) -> list[tuple[str, Report]]:
    """Return the reports, newest first, each with its file's name."""
    found = [(path.name, json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("*.json")]
    return sorted(found, key=lambda item: (item[1]["date"], item[0]), reverse=True)


def add(file: Path, folder: Path = REPORTS) -> Path:
    """Copy a report into the folder; return where it is."""
    report = json.loads(file.read_text(encoding="utf-8"))
    gpus = report["gpus"]
    name = f"{gpus[0]['name']} x{len(gpus)}" if gpus else "no GPU"
    target = folder / f"{report['date']}-{re.sub(r'[^a-z0-9]+', '-', name.lower())}.json"
    folder.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return target


def _readme() -> str:
    return _replaced(ROOT / "README.md", table(read()))


def _page() -> str:
    reports = read()
    head = f"The newest, of {reports[0][1]['date']}" if reports else "No report yet"
    kind = "" if not reports or reports[0][1]["gpus"] else ", was made without a GPU, and shows that the parts run"
    return _replaced(
        ROOT / "docs" / "gpu.md", f"{head}{kind}:\n\n{parts_table(reports[0][1])}" if reports else f"{head}.\n"
    )


def _replaced(page: Path, text: str) -> str:
    return _MARKED.sub(lambda _: text, page.read_text(encoding="utf-8"))


def main(argv: Sequence[str] | None = None) -> int:
    """Write both pages; return 1 if `--check` finds one out of date."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["--add"]:
        print(add(Path(arguments[1])))
        arguments = arguments[2:]
    pages = ((ROOT / "README.md", _readme), (ROOT / "docs" / "gpu.md", _page))
    return max([write_or_check(page, render, __doc__, arguments) for page, render in pages])


if __name__ == "__main__":
    sys.exit(main())
