"""What others rely on: exported names, and the protocol between versions."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import axon_nb
from tests.structure.conftest import module_name, nodes

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
