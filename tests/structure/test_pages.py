"""Pages that follow from the code: design, faults, settings, examples."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from axon_nb.cluster.settings import Settings
from axon_nb.compat import launchers
from axon_nb.engine.groups import creation
from axon_nb.records import environment
from scripts import settings_table
from tests.structure.conftest import nodes

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs" / "design").glob("*.md"))
_QUOTED = re.compile(r"`([\w/.]+(?:\.py|\.md|\.toml|\.csv)|(?:axon_nb|magics|tests|scripts|docs)/[\w/]+)`")
_LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")

_NAME = re.compile(r"`(test_\w+)`")
_WEAKNESS = re.compile(r"^\| ([NC]\d+) \| [^|]+ \| ([^|]+) \|$", re.MULTILINE)
_PROVEN = ("fixed", "follows")
_PROOF = re.compile(r"`test_|N\d")
_TEST = re.compile(r"`([\w/]+\.(?:py|toml))(?:::(test_\w+)|\[([^`]+)\])?`")
_DEFINED = re.compile(r"^def (test_\w+)\(", re.MULTILINE)

_READS = ("get", "setdefault", "getenv")
_TEMPLATES = "axon_nb/export/"
"""Holds the text of scripts, which read variables of their own."""


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


@pytest.mark.parametrize("page", ["faults.md", "gpu.md"])
def test_faults_page_names_existing_tests(page: str) -> None:
    named = set(_NAME.findall((ROOT / "docs" / page).read_text(encoding="utf-8")))
    defined = {
        name for path in (ROOT / "tests").rglob("test_*.py") for name in _DEFINED.findall(path.read_text("utf-8"))
    }
    assert len(named) > 10
    assert named - defined == set()


def test_findings_name_existing_tests() -> None:
    """Every script has a row, and every row a test, or "none" where axon_nb does nothing."""
    page = ROOT / "findings" / "README.md"
    rows = [line.rstrip(" |").split(" | ") for line in page.read_text("utf-8").splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row[-1] != "test"]
    scripts = {path.stem for path in page.parent.glob("*.sh")}
    assert {row[0].partition("[")[2].partition("]")[0] for row in rows if row[0].startswith("| [")} == scripts
    for row in rows:
        assert row[-1] != "none" or row[-2].startswith("nothing"), row[0]
        named = _TEST.fullmatch(row[-1])
        assert named or row[-1] == "none", row[0]
        file, name, case = named.groups() if named else ("", "", "")
        text = (ROOT / "tests" / file).read_text("utf-8") if file else ""
        assert not name or f"def {name}(" in text, row[-1]
        assert not case or f'"{case}": (' in text, row[-1]


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


def registered() -> set[str]:
    """The names of all variables in the register."""
    entries = [value for name, value in vars(environment).items() if name.isupper()]
    single = {entry.name for entry in entries if isinstance(entry, environment.Variable)}
    return single | {name for entry in entries if isinstance(entry, environment.Variables) for name in entry.names}


def read_by_name(path: Path) -> set[str]:
    """The variables that code reads by a literal name: `os.environ.get("X")`, `environ["X"]`."""
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _READS:
            owner, key = ast.unparse(node.func), node.args[0] if node.args else None
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            owner, key = ast.unparse(node.value), node.slice
        else:
            continue
        if isinstance(key, ast.Constant) and isinstance(key.value, str) and re.search(r"environ|getenv", owner):
            names.add(key.value)
    return names


def test_every_variable_that_the_package_reads_is_registered(package_files: list[Path], root: Path) -> None:
    read: dict[str, set[str]] = {}
    for path in package_files:
        text = path.read_text(encoding="utf-8")
        own = set(re.findall(r"\bAXON_NB_[A-Z_]+\b", text))
        name = path.relative_to(root).as_posix()
        read[name] = own | (set() if name.startswith(_TEMPLATES) else read_by_name(path))
    unknown = {name: sorted(found - registered()) for name, found in read.items() if found - registered()}
    assert not unknown, f"not in axon_nb/records/environment.py: {unknown}"
    assert "RANK" in read["axon_nb/records/training/job.py"], "reads are found"
    assert {*creation.DEFAULTS, *launchers._ACCELERATE_PLUGINS} <= registered()


def test_every_setting_and_variable_has_a_docstring() -> None:
    assert settings_table.docstrings(settings_table.SETTINGS, "Settings").keys() == Settings.known().keys()
    variables = {name for name in vars(environment) if name.isupper() and not name.startswith("_")}
    assert settings_table.docstrings(settings_table.VARIABLES).keys() == variables


def test_the_page_is_up_to_date() -> None:
    assert settings_table.main(["--check"]) == 0


def test_notebooks_hold_no_outputs(root: Path) -> None:
    notebooks = sorted((root / "examples").glob("*.ipynb"))
    assert notebooks
    for path in notebooks:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = [cell for cell in cells if cell["cell_type"] == "code"]
        assert code, path.name
        assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code), path.name
