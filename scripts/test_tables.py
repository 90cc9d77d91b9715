"""Write the tables of `docs/tests.md`: how long tests take.

    scripts/test all --durations 0 | tee out/tests.log
    python -m scripts.test_tables durations out/tests.log

The rest of the page stays. With the durations of all tests, tests/durations.json is written as well, by which tests are
scheduled. Files that are new or have changed much can be measured alone; the seconds of the others stay:

    scripts/test tests/host/link --durations 0 | tee out/tests.log
    python -m scripts.test_tables files out/tests.log
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks.report import machine
from scripts.generated_page import ROOT

BY_FILE = ROOT / "tests" / "durations.json"
PAGE = ROOT / "docs" / "tests.md"
NUM_SLOWEST = 40
_DURATION = re.compile(r"^([\d.]+)s (setup|call|teardown) +(tests/\S+::.+)$")


def read_durations(log: str) -> dict[str, float]:
    """Return the seconds of each test, including setup and teardown, from a log of ``pytest --durations 0``.

    Raises:
        ValueError: The log lists no durations.
    """
    seconds: dict[str, float] = defaultdict(float)
    for line in log.splitlines():
        if found := _DURATION.match(line):
            seconds[found[3]] += float(found[1])
    if not seconds:
        raise ValueError("The log lists no durations: run pytest with `--durations 0`.")
    return dict(seconds)


def by_folder(seconds: Mapping[str, float]) -> dict[str, tuple[int, float]]:
    """Return, for each folder below `tests`, how many tests took at least 5 ms and their seconds; longest first."""
    found: dict[str, list[float]] = defaultdict(list)
    for test, taken in seconds.items():
        found[test.split("/")[1]].append(taken)
    sums = {folder: (len(each), sum(each)) for folder, each in found.items()}
    return dict(sorted(sums.items(), key=lambda item: -item[1][1]))


def by_file(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each file, to a tenth, by path."""
    found: dict[str, float] = defaultdict(float)
    for test, taken in seconds.items():
        found[test.partition("::")[0]] += taken
    return {file: round(found[file], 1) for file in sorted(found)}


def updated(known: Mapping[str, float], log: str) -> dict[str, float]:
    """Return known seconds by file with those of a log in their place, without files that are gone."""
    seconds = {**known, **by_file(read_durations(log))}
    return {file: seconds[file] for file in sorted(seconds) if (ROOT / file).exists()}


def _table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
    titles = list(head)
    lines = [titles, ["---"] * len(titles), *([str(cell) for cell in row] for row in rows)]
    return [f"| {' | '.join(line)} |" for line in lines]


def _durations(log: str, note: str) -> list[str]:
    seconds = read_durations(log)
    slowest = sorted(seconds.items(), key=lambda item: -item[1])[:NUM_SLOWEST]
    lines = [f"{_when()} {note}".rstrip(), ""]
    if "= slowest durations =" in log:  # all, not the slowest alone
        _write(by_file(seconds))
        folders = by_folder(seconds).items()
        lines += [*_table(("folder", "tests", "seconds"), ((f"`{f}`", n, f"{s:.0f}") for f, (n, s) in folders)), ""]
    rows = ((f"`{test.removeprefix('tests/')}`", f"{taken:.0f}") for test, taken in slowest)
    return [*lines, f"The {len(slowest)} slowest:", "", *_table(("test", "seconds"), rows)]


def _write(seconds: Mapping[str, float]) -> None:
    BY_FILE.write_text(json.dumps(seconds, indent=0) + "\n", encoding="utf-8")


def _when() -> str:
    facts = machine()
    return f"Measured on {facts['date']}: {facts['cpu']}, Python {facts['python']}, torch {facts['torch']}."


def replace_table(page: str, name: str, lines: Iterable[str]) -> str:
    """Return a page with new lines between ``<!-- name -->`` and ``<!-- end of name -->``.

    Raises:
        ValueError: The page has no such markers.
    """
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, found, rest = page.partition(begin)
    _, also_found, after = rest.partition(end)
    if not found or not also_found:
        raise ValueError(f"{PAGE.name} has no place for {name}: add `{begin.strip()}` and `{end}`.")
    table = "\n".join(lines)
    return f"{before}{begin}\n{table}\n\n{end}{after}"


def main() -> None:
    """Write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="table", required=True)
    durations = commands.add_parser("durations")
    durations.add_argument("log", type=Path)
    durations.add_argument("--note", default="", help="a sentence about the run, such as what else ran on the machine")
    files = commands.add_parser("files")
    files.add_argument("log", type=Path)
    options = parser.parse_args()
    log = options.log.read_text(encoding="utf-8")
    if options.table == "files":
        _write(updated(json.loads(BY_FILE.read_text(encoding="utf-8")), log))
        return
    lines = _durations(log, options.note)
    PAGE.write_text(replace_table(PAGE.read_text(encoding="utf-8"), "durations", lines), encoding="utf-8")


if __name__ == "__main__":
    main()
