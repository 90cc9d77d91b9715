"""What may import what, what an import loads, and what others rely on: exported names and the protocol."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import axon_nb
from tests.structure.conftest import module_name, nodes

NOTEBOOK_ONLY = {"IPython", "anywidget", "ipykernel", "ipyparallel", "ipywidgets", "plotly"}
WITHOUT_A_NOTEBOOK = ("comm", "compat", "host", "parallel", "plan", "records", "torch_api")
STDLIB_ONLY = {"host": {"host", "records", "errors"}, "records": {"_version", "records", "errors"}}
"""Packages that import only the standard library, msgspec, packaging and NVML, and which siblings they may import."""


def loaded_after(code: str) -> set[str]:
    """Top-level names of the modules that a fresh interpreter holds after running `code`."""
    code = f"{code}\nimport json, sys\nprint(json.dumps(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(run.stdout.splitlines()[-1]))


def is_type_checking(test: ast.expr) -> bool:
    """Whether a condition holds for type checkers alone."""
    return ast.unparse(test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def imported_modules(path: Path) -> set[str]:
    """The dotted names that a file imports, anywhere in it; those for type checkers alone left out."""
    checked = [node for node in nodes(path) if isinstance(node, ast.If) and is_type_checking(node.test)]
    for_checkers = {id(node) for block in checked for statement in block.body for node in ast.walk(statement)}
    names: set[str] = set()
    for node in nodes(path):
        if id(node) in for_checkers:
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names if node.module == "axon_nb")
    return names


def modules_below(root: Path, package: str) -> str:
    """Python source that imports a package and everything in it, a line each."""
    files = sorted((root / "axon_nb" / package).rglob("*.py"))
    names = [".".join(path.relative_to(root).with_suffix("").parts) for path in files if path.name != "__main__.py"]
    return "\n".join(f"import {name.removesuffix('.__init__')}" for name in names)


def test_package_alone_loads_nothing_heavy() -> None:
    heavy = {"torch", "numpy", "pandas", "psutil", "zmq"} | NOTEBOOK_ONLY
    assert not loaded_after("import axon_nb") & heavy


def test_notebook_side_does_not_load_torch_module_by_module(root: Path) -> None:
    code = "\n".join(modules_below(root, package) for package in ("cluster", "doctor", "magics", "widgets"))
    assert "torch" not in loaded_after(code)


def test_rank_does_not_load_widgets(root: Path) -> None:
    assert not loaded_after(modules_below(root, "engine")) & {"anywidget", "ipywidgets", "plotly"}


@pytest.mark.parametrize("package", WITHOUT_A_NOTEBOOK)
def test_library_imports_nothing_of_a_notebook(package: str, root: Path) -> None:
    for path in sorted((root / "axon_nb" / package).rglob("*.py")):
        names = {name.partition(".")[0] for name in imported_modules(path)}
        assert not names & NOTEBOOK_ONLY, path


@pytest.mark.parametrize("package", STDLIB_ONLY)
def test_package_imports_only_the_standard_library(package: str, root: Path) -> None:
    files = sorted((root / "axon_nb" / package).rglob("*.py"))
    assert files
    for path in files:
        for name in imported_modules(path):
            first, *rest = name.split(".")
            of_ours = first == "axon_nb" and (not rest or rest[0] in STDLIB_ONLY[package])
            others = {"kubernetes", "msgspec", "packaging", "pynvml", "ray", "yaml"}
            assert of_ours or first in sys.stdlib_module_names | others, f"{path.relative_to(root)} imports {name}"


@pytest.fixture
def rooms() -> Any:
    """The script, which needs grimp."""
    pytest.importorskip("grimp")
    return importlib.import_module("scripts.rooms")


def test_arrows_that_a_longer_path_implies_are_left_out(rooms: Any) -> None:
    found = {"magics": {"cluster", "engine", "errors"}, "cluster": {"engine"}, "engine": {"errors"}, "errors": set()}
    assert rooms.reduced(found) == {
        "magics": {"cluster"},
        "cluster": {"engine"},
        "engine": {"errors"},
        "errors": set(),
    }


def test_the_page_is_up_to_date(rooms: Any) -> None:
    assert rooms.TARGET.read_text(encoding="utf-8") == rooms.render()


ROOM = "axon_nb/records/protocol/"
TARGET = re.compile(r"^axon_nb\.[\w.]+:[a-z]\w*$")
REQUEST = re.compile(r"^axon_(?!nb(_|$))[a-z_]+$")

OTHERS = {
    "axon_mock": "name of a backend",
    "axon_mock_": "names of its groups",
    "axon_nccl": "name of a backend",
    "axon_nccl_": "names of its groups",
    "axon_profiles": "name of a folder",
}
"""Strings of these forms that are something else, each with the reason."""


def wrong_exports(name: str) -> str:
    """What is wrong with the `__all__` of a module; empty if nothing is."""
    module = import_module(name)
    exports = getattr(module, "__all__", [])
    missing = [key for key in exports if not hasattr(module, key)]
    if missing:
        return f"exports missing names: {missing}"
    return "" if len(set(exports)) == len(exports) else "exports a name twice"


def test_modules_import_and_their_exports_resolve(package_files: list[Path]) -> None:
    names = [module_name(path) for path in package_files if path.name != "__main__.py"]
    wrong = [f"{name} {finding}" for name in names if (finding := wrong_exports(name))]
    assert not wrong, "\n".join(wrong)


def test_dir_lists_the_exports() -> None:
    assert dir(axon_nb) == sorted(axon_nb.__all__)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'axon_nb' has no attribute 'nothing'"):
        _ = axon_nb.nothing


def test_every_error_is_exported() -> None:
    errors = import_module("axon_nb.errors")
    assert set(errors.__all__) <= set(axon_nb.__all__)


def test_star_import_gives_the_exports() -> None:
    code = "from axon_nb import *; import axon_nb; assert set(axon_nb.__all__) <= set(globals())"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def texts(path: Path) -> Iterator[str]:
    """The string literals of a file, docstrings left out."""
    said = {id(node.value) for node in nodes(path) if isinstance(node, ast.Expr)}
    for node in nodes(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
            yield node.value


def found(package_files: list[Path], root: Path, pattern: re.Pattern[str]) -> dict[str, list[str]]:
    """The strings of a form, by file outside the room."""
    by_file = {path.relative_to(root).as_posix(): sorted(filter(pattern.match, texts(path))) for path in package_files}
    return {
        name: strange
        for name, strings in by_file.items()
        if not name.startswith(ROOM) and (strange := [text for text in strings if text not in OTHERS])
    }


def test_functions_of_other_processes_are_named_in_the_room(package_files: list[Path], root: Path) -> None:
    strange = found(package_files, root, TARGET)
    assert not strange, f"declare a RankCall in {ROOM} instead: {strange}"


def test_requests_are_named_in_the_room(package_files: list[Path], root: Path) -> None:
    strange = found(package_files, root, REQUEST)
    assert not strange, f"declare a Request in {ROOM} instead: {strange}"


def test_cells_are_made_by_the_room(package_files: list[Path], root: Path) -> None:
    makers = [
        path.relative_to(root).as_posix()
        for path in package_files
        if any("__import__(" in text for text in texts(path))
    ]
    assert [name for name in makers if not name.startswith(ROOM)] == [], "use `cell_source` of a RankCall"
