"""The pages of faults and of GPUs name tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
_NAME = re.compile(r"`(test_\w+)`")
_WEAKNESS = re.compile(r"^\| ([NC]\d+) \| [^|]+ \| ([^|]+) \|$", re.MULTILINE)
_PROVEN = ("fixed", "follows")
_PROOF = re.compile(r"`test_|N\d")
_DEFINED = re.compile(r"^def (test_\w+)\(", re.MULTILINE)


@pytest.mark.parametrize("page", ["faults.md", "gpu.md"])
def test_faults_page_names_existing_tests(page: str) -> None:
    named = set(_NAME.findall((ROOT / "docs" / page).read_text(encoding="utf-8")))
    defined = {
        name for path in (ROOT / "tests").rglob("test_*.py") for name in _DEFINED.findall(path.read_text("utf-8"))
    }
    assert len(named) > 10
    assert named - defined == set()


def test_each_fault_has_an_answer() -> None:
    rows = [line for line in (ROOT / "docs" / "faults.md").read_text("utf-8").splitlines() if line.startswith("| ")]
    answers = [row.rstrip("| ").rpartition(" | ")[2] for row in rows if not row.startswith(("|---", "| # ", "| what"))]
    assert len(answers) > 30
    assert [text for text in answers if len(text) < 10] == []


def test_gpu_weaknesses_have_a_state() -> None:
    rows = _WEAKNESS.findall((ROOT / "docs" / "gpu.md").read_text("utf-8"))
    assert [number for number, _ in rows] == [f"N{n}" for n in range(1, 25)] + [f"C{n}" for n in range(1, 20)]
    assert [number for number, state in rows if not state.startswith((*_PROVEN, "holds", "in part", "open"))] == []
    assert [number for number, state in rows if state.startswith(_PROVEN) and not _PROOF.search(state)] == []
