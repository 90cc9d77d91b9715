"""Write `docs/parity.md` from the tables in `docs/parity`; `--check` only checks that it is up to date.

`axonml.toml` lists what AxonML documents, by topic; `parity.csv` says for each name what it is here and which tests
prove it, `examples.csv` which test each example has become, and `runs.toml` where each test was run last.
"""

from __future__ import annotations

import csv
import sys
import tomllib
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from scripts.generated_page import ROOT, write_or_check

DOCS = ROOT / "docs"
SOURCES = DOCS / "parity"
RUNS = SOURCES / "runs.toml"
TARGET = DOCS / "parity.md"

HEAD = """\
# AxonML and axon_nb

Maps every name documented by AxonML's crate `axonml-distributed`, and by a distributed-training guide, to its axon_nb
equivalent and the tests that cover it. The second part maps every example in these documents to a test.

Names are Pythonic: `snake_case`, enums in capitals, keyword arguments instead of builder chains. `comm` stands for
`axon_nb.comm`, `parallel` for `axon_nb.parallel`. `scripts/parity_table.py` generates this page from the tables in
`docs/parity`.

The last column says where each test ran last: on CPUs, in the [slow tier](../CONTRIBUTING.md) (`make soak`), or not at
all. A test that was skipped was not run.
"""
_NO_RECORD = "not run"
"""A test that `runs.toml` does not have."""


def read_list() -> dict[str, Any]:
    """Read what AxonML documents: `topic` and `document`, each a list of tables."""
    return tomllib.loads((SOURCES / "axonml.toml").read_text(encoding="utf-8"))


def _rows(name: str) -> list[dict[str, str]]:
    with (SOURCES / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def read_names() -> list[dict[str, str]]:
    """Read rows of `theirs`, `ours`, `proof`, `note`; `ours` and `proof` hold one or more words."""
    return _rows("parity.csv")


def read_examples() -> list[dict[str, str]]:
    """Read rows of `document`, `example`, `proof`, `note`."""
    return _rows("examples.csv")


def read_runs() -> tuple[str, Mapping[str, str]]:
    """Read when and on what machine the tests were run last, and where each of them ran."""
    found = tomllib.loads(RUNS.read_text(encoding="utf-8"))
    return found["machine"], found["tests"]


def is_run(place: str) -> bool:
    """Whether a test that ran at this place was run at all."""
    return "not run" not in place


def named_tests() -> list[str]:
    """Return all tests that the tables name."""
    return sorted({test for row in [*read_names(), *read_examples()] for test in row["proof"].split()})


def _ours(row: dict[str, str]) -> str:
    shown = []
    for word in row["ours"].split():
        path, _, keywords = word.removeprefix("axon_nb.").partition("(")
        call = f"({', '.join(keywords[:-1].split(','))})" if keywords else ""
        shown.append(f"`{path}{call}`")
    return "; ".join([", ".join(shown), *([row["note"]] if row["note"] else [])])


def _proof(row: dict[str, str]) -> str:
    links = []
    for node in row["proof"].split():
        file, _, test = node.partition("::")
        links.append(f"[{test.removeprefix('test_').replace('_', ' ')}](../{file})")
    return "<br>".join(links)


def run_places(row: dict[str, str], runs: Mapping[str, str]) -> list[str]:
    """Return where each test of a row ran."""
    return [runs.get(node, _NO_RECORD) for node in row["proof"].split()]


def _run(row: dict[str, str], runs: Mapping[str, str]) -> str:
    places = run_places(row, runs)
    return "<br>".join(places if len(set(places)) > 1 else places[:1])


def summary(rows: Sequence[dict[str, str]], machine: str, runs: Mapping[str, str]) -> str:
    """Say how many rows have a test that was run."""
    proven = sum(any(map(is_run, run_places(row, runs))) for row in rows)
    return f"{proven} of {len(rows)} lines have a test that ran ({machine}); {len(rows) - proven} have none.\n"


def render() -> str:
    """Render `docs/parity.md`."""
    known, by_name, (machine, runs) = read_list(), {row["theirs"]: row for row in read_names()}, read_runs()
    lines = [HEAD, summary([*by_name.values(), *read_examples()], machine, runs)]
    for part, topics in groupby(known["topic"], key=lambda topic: topic["part"]):
        lines.append(f"## {part}\n")
        for topic in topics:
            lines += [f"### {topic['title']}\n", "| AxonML | axon_nb | tests | run |", "|---|---|---|---|"]
            rows = [by_name[name] for name in topic["names"]]
            lines += [
                f"| {_theirs(row['theirs'])} | {_ours(row)} | {_proof(row)} | {_run(row, runs)} |" for row in rows
            ]
            lines.append("")
    lines.append("## Examples\n")
    examples = {(row["document"], row["example"]): row for row in read_examples()}
    for document in known["document"]:
        lines += [f"### {document['title']}\n", "| example | test | run |", "|---|---|---|"]
        for name in document["examples"]:
            row = examples[document["title"], name]
            note = f" ({row['note']})" if row["note"] else ""
            lines.append(f"| {name}{note} | {_proof(row)} | {_run(row, runs)} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _theirs(name: str) -> str:
    """Format names as code, descriptions as text."""
    return name if " " in name and "(" not in name else f"`{name}`"


def main(argv: list[str] | None = None) -> int:
    """Write the table; return 1 if `--check` finds it out of date."""
    return write_or_check(TARGET, render, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
