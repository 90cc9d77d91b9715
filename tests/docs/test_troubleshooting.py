"""Every entry of the troubleshooting page is a message of the code, with a stable address."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from scripts.generated_page import ROOT
from scripts.site_reference import template

_ENTRY = re.compile(
    r"^\((?P<label>[a-z-]+)\)=\n### (?P<ticks>`+) ?(?P<message>.+?) ?(?P=ticks)\n\n(?P<advice>.+)", re.MULTILINE
)
_PAGE = (ROOT / "docs" / "help" / "troubleshooting.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def texts() -> str:
    """All texts of the package, one per line, with `…` for what is inserted."""

    def all_texts() -> Iterator[str]:
        for folder in ("axon_nb", "magics"):
            for path in (ROOT / folder).rglob("*.py"):
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                    if isinstance(node, ast.JoinedStr | ast.Constant):
                        yield template(node).replace("\n", " ")

    return "\n".join(all_texts())


def test_every_entry_is_a_message_of_the_code(texts: str) -> None:
    entries = list(_ENTRY.finditer(_PAGE))
    assert len(entries) >= 25
    assert len(entries) == _PAGE.count("\n### ")
    assert len({entry["label"] for entry in entries}) == len(entries)
    for entry in entries:
        parts = [part for part in entry["message"].split("…") if part]
        pattern = "[^\n]*?".join(re.escape(part) for part in parts)
        assert re.search(pattern, texts), entry["message"]


def test_stale_messages_are_detected(texts: str) -> None:
    assert not re.search(re.escape("The cluster … has gone fishing"), texts)
