"""The site builds without a warning, and all links within it lead somewhere."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from scripts.generated_page import ROOT
from scripts.site_pages import notebook_page, relinked

REPOSITORY = "https://github.com/owner/name"

# The first test that needs the site waits until it is built.
pytestmark = pytest.mark.timeout(600)


class Page(HTMLParser):
    """Collects what a page links to, and what can be linked to in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.anchors: set[str] = set()
        self.pictures: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag's links and its name."""
        values = {name: value for name, value in attrs if value is not None}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "img":
            self.pictures.add(values["src"])
        if tag != "link":
            self.targets |= {values[name] for name in ("href", "src") if name in values}
        self.targets |= {source.split()[0] for source in values.get("srcset", "").split(",") if source.strip()}


def test_site_links_resolve(site: Path) -> None:
    pages = {path: Page(path) for path in sorted(site.rglob("*.html"))}
    assert len(pages) > 30
    broken = []
    for path, page in pages.items():
        for target in page.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc or target in ("#", "#top"):
                continue
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not file.is_file() or (parts.fragment and unquote(parts.fragment) not in pages[file].anchors):
                broken.append(f"{path.relative_to(site)}: {target}")
    assert not broken, "\n".join(broken)


def test_pictures_are_on_the_site(site: Path) -> None:
    pictures = {picture for path in site.rglob("*.html") for picture in Page(path).pictures}
    assert any(picture.endswith("recovery.webp") for picture in pictures)
    assert [picture for picture in pictures if picture.startswith("http")] == []


def test_repository_links_resolve_to_files() -> None:
    pages = [path for path in (ROOT / "docs").rglob("*.md") if "generated" not in path.parts]
    linked = [relinked(path.read_text(encoding="utf-8"), path.parent, REPOSITORY) for path in pages]
    paths = {path for text in linked for path in re.findall(rf"\({REPOSITORY}/(?:blob|tree)/HEAD/([^)#]+)", text)}
    assert len(paths) > 30
    assert sorted(path for path in paths if not (ROOT / path).exists()) == []


def test_every_page_is_in_the_menu(site: Path) -> None:
    page = Page(site / "index.html")
    shown = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    apart = {"genindex.html", "index.html", "py-modindex.html", "search.html"}
    below = {name for name in shown if name.startswith(("design/", "examples/", "reference/api/", "_"))}
    assert shown - apart - below <= {urlsplit(target).path for target in page.targets}


def test_external_links_go_to_the_repository() -> None:
    text = (
        "[a](../SECURITY.md#b) [c](measured.md#d) [e](#f) [g](../examples/01_quickstart.ipynb) [h](https://i) "
        "[j](../axon_nb)"
    )
    assert relinked(text, ROOT / "docs", REPOSITORY) == (
        f"[a]({REPOSITORY}/blob/HEAD/SECURITY.md#b) [c](measured.md#d) [e](#f) [g](/examples/01_quickstart.ipynb) "
        f"[h](https://i) [j]({REPOSITORY}/tree/HEAD/axon_nb)"
    )


def test_without_an_address_files_are_named() -> None:
    text = "[SECURITY.md](../SECURITY.md) and [`a[0]`](../axon_nb/cli.py#b), [c](measured.md#d), [e](https://f)"
    assert relinked(text, ROOT / "docs", "") == (
        "SECURITY.md and `a[0]` (`axon_nb/cli.py`), [c](measured.md#d), [e](https://f)"
    )


def test_outputs_are_shown_only_for_the_current_notebook() -> None:
    picture = {"output_type": "display_data", "data": {"text/html": "<svg/>"}, "metadata": {}}
    view = {"output_type": "display_data", "data": {"application/vnd.jupyter.widget-view+json": {}}, "metadata": {}}

    def notebook(code: str, *outputs: dict[str, object]) -> dict[str, object]:
        cells = [
            {"cell_type": "markdown", "metadata": {}, "source": ["# A title"]},
            {"cell_type": "code", "metadata": {}, "source": [code], "outputs": list(outputs), "execution_count": None},
        ]
        return json.loads(json.dumps({"cells": cells, "metadata": {}}))

    current = notebook_page(notebook("1"), notebook("1", view, picture), ROOT / "examples" / "01.ipynb")
    assert current["cells"][-1]["outputs"] == [picture]
    figure = {
        "output_type": "display_data",
        "data": {
            "application/vnd.plotly.v1+json": {},
            "text/html": ['<div>\n<script src="https://cdn/mathjax/svg.js"></script>', "<p></p></div>"],
        },
        "metadata": {},
    }
    page = notebook_page(notebook("1"), notebook("1", figure), ROOT / "examples" / "01.ipynb")
    assert page["cells"][-1]["outputs"][0]["data"] == {"text/html": "<div>\n<p></p></div>"}
    old = notebook_page(notebook("2"), notebook("1", view, picture), ROOT / "examples" / "01.ipynb")
    assert old["cells"][-1]["source"] == ["2"]
    assert old["cells"][-1]["outputs"] == []
    assert "without outputs" in old["cells"][1]["source"]
