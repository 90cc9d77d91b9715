"""The design pages name files and folders that exist, and are all linked from the index."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted((ROOT / "docs" / "design").glob("*.md"))
_QUOTED = re.compile(r"`([\w/.]+(?:\.py|\.md|\.toml|\.csv)|(?:axon_nb|magics|tests|scripts|docs)/[\w/]+)`")
_LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def _exists(name: str) -> bool:
    parts = Path(name).parts
    roots = [ROOT, ROOT / "axon_nb", *(ROOT / "axon_nb").iterdir(), ROOT / "docs" / "parity", ROOT / "tests"]
    if any((root / name).exists() for root in roots if root.is_dir()):
        return True
    return len(parts) <= 2 and any((ROOT / "axon_nb").rglob(name))  # as short as the sentence allows


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_name_files_that_exist(page: Path) -> None:
    names = set(_QUOTED.findall(page.read_text(encoding="utf-8")))
    assert [name for name in sorted(names) if not _exists(name)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_begin_with_their_rooms(page: Path) -> None:
    assert page.read_text(encoding="utf-8").split("\n\n")[1].startswith("Rooms: ")


@pytest.mark.parametrize("page", [ROOT / "docs" / "design.md", *PAGES], ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    links = set(_LINK.findall(page.read_text(encoding="utf-8")))
    assert [link for link in sorted(links) if not (page.parent / link).exists()] == []


def test_index_links_every_page() -> None:
    index = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    assert [page.name for page in PAGES if f"(design/{page.name})" not in index] == []
