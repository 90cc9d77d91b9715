"""What the site has besides the pages that are written by hand: Sphinx loads this module as part of `docs/conf.py`.

Before each build, pages that are made from the code are written to `docs/reference/generated`, copies of the examples
to `docs/examples`, and the solved edition of the course to `docs/course`; git ignores these folders. A copy has outputs
if `make site-notebooks` has run the notebook as it now is.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from plotly.io import to_html

from scripts.build_course import EDITIONS, SOURCES
from scripts.generated_page import ROOT
from scripts.pair_notebooks import render
from scripts.repository import address
from scripts.site_api import API, api_page, to_rst
from scripts.site_reference import errors_page, options_page

REPOSITORY = address()
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"
EXECUTED = ROOT / "out" / "notebooks"
"""Where `make site-notebooks` puts the notebooks that it has run."""

_LINK = re.compile(r"\[((?:[^][]|\[[^][]*\])*)\]\((?!\w+:|#|/)([^)#\s]+)(#[^)\s]*)?\)")
_PICTURE = re.compile(r'<picture>.*?srcset="([^"]+)".*?alt="([^"]+)" src="([^"]+)".*?</picture>', re.DOTALL)
_BOTH = """\
```{{image}} {light}
:alt: {text}
:class: only-light
```
```{{image}} {dark}
:alt: {text}
:class: only-dark
```"""
"""What furo shows of a picture that GitHub chooses by the reader's theme."""
_ON_THE_SITE = {".ipynb", ".md", ".png", ".webp"}
_WIDGET = "application/vnd.jupyter.widget-view+json"
_PLOTLY = "application/vnd.plotly.v1+json"
_MATHJAX = re.compile(r'<script src="https://[^"]*mathjax[^"]*"></script>')
"""What plotly loads for formulas, of which our figures have none."""
_NOT_RUN = "*Shown without outputs. Run it {}on your machine to see them.*"
_BINDER = "[on Binder](https://mybinder.org/v2/gh/{}/HEAD?urlpath=lab/tree/{}) or "


def setup(app: Any) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("config-inited", lambda *_: write_pages())
    app.connect("source-read", _relink_page)
    app.connect("autodoc-process-docstring", lambda *event: to_rst(event[-1]), priority=400)  # before napoleon
    return {"parallel_read_safe": True}


def write_pages() -> None:
    """Write all generated pages into `docs`."""
    write_notebooks(DOCS / "examples")
    write_course(DOCS / "course")
    generated = DOCS / "reference" / "generated"
    generated.mkdir(parents=True, exist_ok=True)
    pages = {"options": options_page(), "errors": errors_page(), **{name: api_page(name) for name in API}}
    for name, text in pages.items():
        _write(generated / f"{name}.md", text)


def write_notebooks(folder: Path) -> None:
    """Write the site's copies of the examples."""
    for path in sorted(EXAMPLES.glob("*.ipynb")):
        _write_notebook(folder, path, path.read_text(encoding="utf-8"))


def write_course(folder: Path) -> None:
    """Write the solved edition of the course's notebooks."""
    for source in sorted(SOURCES.glob("[0-9]*.py")):
        learners = SOURCES / "student" / f"{source.stem}.ipynb"
        _write_notebook(folder, learners, render(source, EDITIONS["solved"]))


def _write_notebook(folder: Path, path: Path, text: str) -> None:
    executed = EXECUTED / path.name
    ran = json.loads(executed.read_text(encoding="utf-8")) if executed.exists() else None
    page = notebook_page(json.loads(text), ran, path)
    folder.mkdir(exist_ok=True)
    _write(folder / path.name, json.dumps(page, indent=1) + "\n")


def notebook_page(notebook: dict[str, Any], executed: dict[str, Any] | None, path: Path) -> dict[str, Any]:
    """Return what the site shows of a notebook.

    Args:
        notebook: The notebook without outputs.
        executed: The same one after it ran, or an older one, or None.
        path: The notebook of the repository that readers run: its links start there.
    """
    current = executed is not None and _sources(executed) == _sources(notebook)
    page: dict[str, Any] = executed if executed is not None and current else notebook
    # Live views need a kernel; each has a picture of itself next to it, which stays.
    page["metadata"].pop("widgets", None)
    has_library = False
    for cell in page["cells"]:
        cell["source"] = (
            relinked("".join(cell["source"]), path.parent) if cell["cell_type"] == "markdown" else cell["source"]
        )
        if "outputs" in cell:
            cell["outputs"] = [output for output in cell["outputs"] if _WIDGET not in output.get("data", {})]
            for data in (output.get("data", {}) for output in cell["outputs"] if _PLOTLY in output.get("data", {})):
                _show_as_html(data, with_library=not has_library)
                has_library = True
    if not current:
        project = REPOSITORY.removeprefix("https://github.com/")
        note = _NOT_RUN.format(_BINDER.format(project, path.relative_to(ROOT).as_posix()) if project else "")
        page["cells"].insert(1, {"cell_type": "markdown", "id": "not-run", "metadata": {}, "source": note})
    return page


def _show_as_html(data: dict[str, Any], *, with_library: bool) -> None:
    """Leave a plotly figure its HTML, which needs no kernel and no network."""
    figure = data.pop(_PLOTLY)
    if "text/html" not in data:
        data["text/html"] = to_html(figure, include_plotlyjs=with_library, full_html=False, validate=False)
    data["text/html"] = _MATHJAX.sub("", "".join(data["text/html"]))


def _sources(notebook: dict[str, Any]) -> list[str]:
    return ["".join(cell["source"]) for cell in notebook["cells"]]


def relinked(text: str, folder: Path, repository: str = REPOSITORY) -> str:
    """Point the relative links of a page that leave the site to the repository, and those to notebooks to their copies.

    Args:
        text: The page, in Markdown.
        folder: Where links start.
        repository: Its address; empty: the name of the file replaces a link to it.
    """

    def replace(link: re.Match[str]) -> str:
        shown, anchor = link[1], link[3] or ""
        target = (folder / link[2]).resolve()
        for copies, notebooks in (("examples", EXAMPLES), ("course", SOURCES / "student")):
            if target.parent == notebooks and target.suffix == ".ipynb":
                return f"[{shown}](/{copies}/{target.name}{anchor})"
        if not target.is_relative_to(ROOT) or (target.is_relative_to(DOCS) and target.suffix in _ON_THE_SITE):
            return link[0]
        name = target.relative_to(ROOT).as_posix()
        if not repository:
            return shown if target.name in shown else f"{shown} (`{name}`)"
        return f"[{shown}]({repository}/{'tree' if target.is_dir() else 'blob'}/HEAD/{name}{anchor})"

    return _LINK.sub(replace, text)


def _relink_page(app: Any, name: str, source: list[str]) -> None:
    path = Path(app.env.doc2path(name))
    if path.suffix == ".md":
        text = _PICTURE.sub(lambda found: _BOTH.format(dark=found[1], text=found[2], light=found[3]), source[0])
        source[0] = relinked(text, path.parent)


def _write(path: Path, text: str) -> None:
    """Write a file if it changes, so that Sphinx reads again only what is new."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
