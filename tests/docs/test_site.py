"""The site builds without a warning, its links lead somewhere, and its pages of reference are complete."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib import import_module, metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from axon_nb import cli
from axon_nb.cluster.failures import RankError, cell_error
from axon_nb.errors import ClusterLostError, UsageError
from axon_nb.magics.arguments import EXAMPLES
from axon_nb.remote.tools import TOOLS
from axon_nb.troubleshooting import MORE, PAGE, Entry, entries, explain, more, name_of
from axon_nb.wrong_numbers import faults_of
from scripts.generated_page import ROOT
from scripts.site_api import API, to_rst
from scripts.site_pages import notebook_page, relinked
from scripts.site_reference import command_help, messages, options_page, template, tools_section

pytestmark = pytest.mark.timeout(600)

REPOSITORY = "https://github.com/owner/name"

_IMPORT = re.compile(r"^\s*from (axon_nb[\w.]*) import (\w+)", re.MULTILINE)

ENTRIES = entries()


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


@pytest.mark.parametrize("module", API)
def test_public_names_have_one_canonical_path(module: str) -> None:
    placed = [name for names in API[module][1].values() for name in names]
    assert len(set(placed)) == len(placed)
    assert set(placed) == set(import_module(module).__all__) - {"__version__"}


def test_docs_and_examples_import_public_modules_only() -> None:
    named = set(
        re.findall(r"`(axon_nb\.[\w.]+)`", (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8"))
    )
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.py")]
    imported = set()
    for file in files:
        for module, name in _IMPORT.findall(file.read_text(encoding="utf-8")):
            path = ROOT.joinpath(*module.split("."), name)
            is_module = path.is_dir() or path.with_suffix(".py").is_file()
            imported.add(f"{module}.{name}" if is_module else module)
    assert imported - set(API) == named & imported
    assert imported > {"axon_nb.comm", "axon_nb.parallel"}


@pytest.mark.parametrize("module", API)
def test_every_public_name_is_on_its_page(site: Path, module: str) -> None:
    anchors = Page(site / "reference" / "generated" / f"{module}.html").anchors
    missing = [name for names in API[module][1].values() for name in names if f"{module}.{name}" not in anchors]
    assert not missing


def test_every_command_is_in_the_overview() -> None:
    overview = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    rows = "\n".join(re.findall(r"^\| (.+?) \| .+ \|$", overview, re.MULTILINE))
    missing = [name for name in EXAMPLES if not re.search(rf"(?<!\w){re.escape(name)}\b", rows)]
    assert not missing


def test_every_command_shows_its_options() -> None:
    page = options_page()
    for name in EXAMPLES:
        assert command_help(name) in page
        assert "example:" in command_help(name)
    assert "## `axon-nb quickstart`" in page
    assert "--devices DEVICES" in command_help("start")


def test_every_tool_of_the_server_is_documented() -> None:
    section = tools_section()
    for name in TOOLS:
        assert f"### `{name}`\n\n```text\n{name}(" in section


def test_messages_come_from_the_code() -> None:
    found = {message.text: message.error for message in messages()}
    assert found["-n must be at least 1; got …."] == "UsageError"
    assert len(found) > 300


def test_docstrings_are_rendered_faithfully() -> None:
    lines = ["Sums `a`s and", "``b``, |c|:", "", "    total(`d`)", "", "Args:", "    x: `e |f|`"]
    to_rst(lines)
    assert lines == [
        "Sums ``a``\\ s and",
        "``b``, \\|c\\|:",
        "",
        "::",
        "",
        "    total(``d``)",
        "",
        "Args:",
        "    x: ``e |f|``",
    ]


def example(entry: Entry) -> list[str]:
    """The lines of the message as the page shows it."""
    return entry.text.partition("```text\n")[2].partition("\n```\n")[0].splitlines()


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


def test_every_heading_is_an_entry() -> None:
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    assert len(ENTRIES) == page.count("\n### ") >= 25
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_every_entry_is_a_message_of_the_code(entry: Entry, texts: str) -> None:
    assert entry.pattern.search(texts)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_every_entry_shows_its_message_as_it_looks(entry: Entry) -> None:
    lines = example(entry)
    assert name_of("\n".join(lines)) == entry.name
    assert [line for line in lines if line.startswith(MORE)] in ([], more("\n".join(lines)))


def test_stale_messages_are_detected(texts: str) -> None:
    assert not Entry("fishing", "The cluster … has gone fishing", "").pattern.search(texts)


def test_errors_end_with_the_name_of_their_entry() -> None:
    lost = ClusterLostError("The cluster 'digits' lost its host agent.")
    assert lost._render_traceback_()[-1] == "More: `%distributed help cluster-gone`"
    assert ClusterLostError("Nobody explains this.")._render_traceback_() == ["ClusterLostError: Nobody explains this."]


def test_errors_of_usage_are_one_line() -> None:
    assert len(UsageError("The cluster 'digits' is in use by another notebook.")._render_traceback_()) == 1


def test_a_failed_cell_points_to_one_entry() -> None:
    killed = {rank: RankError(rank, "died", "", "was killed by SIGKILL") for rank in (0, 1)}
    report = cell_error(killed, first=[0], hint="Run `%distributed repair`.")._render_traceback_()
    assert [line for line in report if line.startswith(MORE)] == report[-1:] == ["More: `%distributed help died`"]
    shown = ("CollectiveMismatchError: …", "More: `%distributed help collective-mismatch`")
    differs = {0: RankError(0, "raised", "CollectiveMismatchError", "Collective mismatch: …", shown)}
    assert "\n".join(cell_error(differs, first=[0])._render_traceback_()).count(MORE) == 1


def test_what_user_code_raises_is_not_looked_up() -> None:
    text = "the hero was killed by a dragon"
    error = {0: RankError(0, "raised", "RuntimeError", text, (f"RuntimeError: {text}",))}
    assert MORE not in "\n".join(cell_error(error, first=[0])._render_traceback_())


def test_entries_are_found_by_name_by_message_and_by_words() -> None:
    by_name = explain(["died"])
    assert "`%distributed repair --from 0` replaces" in by_name
    assert "```" not in by_name
    assert explain(["Rank", "3", "was", "killed", "by", "SIGSEGV", "at", "line", "2"]) == by_name
    assert explain(["SIGSEGV"]) == by_name
    assert len(explain(["GPU"]).splitlines()) > 3
    assert explain(["unicorn"]).startswith("No entry contains 'unicorn'.")


def test_wrong_numbers_are_those_of_the_installed_torch() -> None:
    shown = explain(["wrong-numbers"])
    assert f"torch {metadata.version('torch')}, which is installed:" in shown
    assert all(str(fault) in shown for fault in faults_of(metadata.version("torch")))


@pytest.mark.parametrize("words", [["help", "died"], ["help", "was", "killed", "by"]])
def test_the_program_explains_a_message(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 0
    assert "SIGSEGV" in capsys.readouterr().out
