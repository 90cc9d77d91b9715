"""Write `docs/parity.md` from the tables in `docs/parity`; `--check` only says whether it is up to date.

`axonml.toml` lists what AxonML documents, by topic; `parity.csv` says for each name what it is here and which tests
prove it, and `examples.csv` which test each example has become.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tomllib
from itertools import groupby
from pathlib import Path
from typing import Any

__all__ = ["SOURCES", "main", "read_examples", "read_list", "read_names", "render"]

DOCS = Path(__file__).resolve().parent.parent / "docs"
SOURCES = DOCS / "parity"
TARGET = DOCS / "parity.md"

HEAD = """\
# AxonML and axon_nb

Every name that AxonML's crate `axonml-distributed` documents, and what a distributed-training guide asks for besides:
what it is here, and the tests that prove it. Then every example of its documents, and the test that it has become.

Names are Pythonic: `snake_case`, enums in capitals, keyword arguments instead of chains of builders. `comm` stands for
`axon_nb.comm`, `parallel` for `axon_nb.parallel`. Made by `scripts/parity_table.py` from the tables in `docs/parity`.
"""


def read_list() -> dict[str, Any]:
    """What AxonML documents: `topic` and `document`, each a list of tables."""
    return tomllib.loads((SOURCES / "axonml.toml").read_text(encoding="utf-8"))


def _rows(name: str) -> list[dict[str, str]]:
    with (SOURCES / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def read_names() -> list[dict[str, str]]:
    """Rows of `theirs`, `ours`, `proof`, `note`; `ours` and `proof` hold one or more words."""
    return _rows("parity.csv")


def read_examples() -> list[dict[str, str]]:
    """Rows of `document`, `example`, `proof`, `note`."""
    return _rows("examples.csv")


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


def render() -> str:
    """The text of `docs/parity.md`."""
    known, by_name = read_list(), {row["theirs"]: row for row in read_names()}
    lines = [HEAD]
    for part, topics in groupby(known["topic"], key=lambda topic: topic["part"]):
        lines.append(f"## {part}\n")
        for topic in topics:
            lines += [f"### {topic['title']}\n", "| AxonML | axon_nb | proven by |", "|---|---|---|"]
            rows = [by_name[name] for name in topic["names"]]
            lines += [f"| {_theirs(row['theirs'])} | {_ours(row)} | {_proof(row)} |" for row in rows]
            lines.append("")
    lines.append("## Examples\n")
    examples = {(row["document"], row["example"]): row for row in read_examples()}
    for document in known["document"]:
        lines += [f"### {document['title']}\n", "| example | test |", "|---|---|"]
        for name in document["examples"]:
            row = examples[document["title"], name]
            note = f" ({row['note']})" if row["note"] else ""
            lines.append(f"| {name}{note} | {_proof(row)} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _theirs(name: str) -> str:
    """Names as code, descriptions as text."""
    return name if " " in name and "(" not in name else f"`{name}`"


def main(argv: list[str] | None = None) -> int:
    """Write the table; return 1 when `--check` finds that it is not up to date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the table is not up to date")
    text = render()
    if parser.parse_args(argv).check:
        if TARGET.exists() and TARGET.read_text(encoding="utf-8") == text:
            return 0
        print("docs/parity.md is not up to date; `python scripts/parity_table.py` writes it", file=sys.stderr)
        return 1
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
