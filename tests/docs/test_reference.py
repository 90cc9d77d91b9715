"""Pages of reference are complete: every command, every public name, every message."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

from axon_nb.magics.arguments import EXAMPLES
from axon_nb.remote.tools import TOOLS
from scripts.generated_page import ROOT
from scripts.site_api import API, to_rst
from scripts.site_reference import command_help, messages, options_page, tools_section
from tests.docs.test_site import Page

# The first test that needs the site waits until it is built.
pytestmark = pytest.mark.timeout(600)

_IMPORT = re.compile(r"^\s*from (axon_nb[\w.]*) import (\w+)", re.MULTILINE)


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
