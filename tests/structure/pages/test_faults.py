"""The page of faults names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
_NAME = re.compile(r"`(test_\w+)`")
_DEFINED = re.compile(r"^def (test_\w+)\(", re.MULTILINE)


def test_the_tests_that_it_names_exist() -> None:
    named = set(_NAME.findall((ROOT / "docs" / "faults.md").read_text(encoding="utf-8")))
    defined = {
        name for path in (ROOT / "tests").rglob("test_*.py") for name in _DEFINED.findall(path.read_text("utf-8"))
    }
    assert len(named) > 20
    assert named - defined == set()


def test_each_fault_has_an_answer() -> None:
    rows = [line for line in (ROOT / "docs" / "faults.md").read_text("utf-8").splitlines() if line.startswith("| ")]
    answers = [row.rstrip("| ").rpartition(" | ")[2] for row in rows if not row.startswith(("|---", "| # ", "| what"))]
    assert len(answers) > 30
    assert [text for text in answers if len(text) < 10] == []
