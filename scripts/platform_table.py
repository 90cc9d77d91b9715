"""Write what `make platforms` found into docs/versions.md and docs/howto/front_ends.md.

Each page has two lines, `platforms: NAME` and `end of platforms`, as comments; what stands between them is written.
`--check` writes nothing and fails if a page is out of date.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from typing import Any

from scripts.generated_page import ROOT, write_or_check

RESULTS = ROOT / "benchmarks" / "results" / "platforms"
PAGES = ("docs/howto/front_ends.md", "docs/versions.md")
_MARKED = re.compile(r"(?<=^<!-- platforms: )(\w+)( -->\n).*?(?=^<!-- end of platforms)", re.MULTILINE | re.DOTALL)
_INSTALLING = ("`pip install`", "keeps the platform's torch")


def paths(outcomes: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A row for each path and a column for each platform."""
    rows = [["", *(item["title"] for item in outcomes)], ["---"] * (len(outcomes) + 1)]
    for name, key in {"Python": "python", "torch": "torch"}.items():
        rows.append([f"{name}: tried", *(_ran(item, key) for item in outcomes)])
        rows.append([f"{name}: the platform's", *(item["own"].get(key, "not public") for item in outcomes)])
    rows += [[name, *(_ran(item, name) for item in outcomes)] for name in ("ipython", "ipykernel")]
    rows.append(["class of the kernel", *(item.get("kernel", "ipykernel's") for item in outcomes)])
    rows.append(["date", *(item["date"] for item in outcomes)])
    names = dict.fromkeys(path for item in outcomes for path in item["paths"])
    return rows + [[path, *(_cell(item["paths"].get(path)) for item in outcomes)] for path in names]


def summary(outcomes: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A row for each platform: what ran, and what did not hold."""
    rows = [["packages of", "Python, torch", "IPython, ipykernel", "keeps all versions", "what fails"], ["---"] * 5]
    for item in outcomes:
        why = " ".join(item["paths"].get(path, "") for path in _INSTALLING).strip()
        failed = [path for path, reason in item["paths"].items() if reason and path not in _INSTALLING]
        pairs = (("python", "torch"), ("ipython", "ipykernel"))
        ran = [", ".join(_ran(item, name) for name in pair) for pair in pairs]
        rows.append([item["title"], *ran, f"no: {why}" if why else "yes", ", ".join(failed) or "nothing"])
    return rows


def _ran(item: dict[str, Any], name: str) -> str:
    return str(item["versions"].get(name, "not run"))


def _cell(why: str | None) -> str:
    if why is None:
        return "not run"
    return f"**fails**: {re.sub('[|]', '/', why)}" if why else "yes"


def render(text: str) -> str:
    """The text of a page with fresh tables."""
    outcomes = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]

    def table(match: re.Match[str]) -> str:
        rows = {"paths": paths, "summary": summary}[match[1]](outcomes)
        return match[1] + match[2] + "".join("| " + " | ".join(row) + " |\n" for row in rows)

    return _MARKED.sub(table, text)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pages, or check them."""
    places = [ROOT / page for page in PAGES]
    return max(write_or_check(place, lambda at=place: render(at.read_text()), __doc__, argv) for place in places)


if __name__ == "__main__":
    sys.exit(main())
