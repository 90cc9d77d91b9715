"""What crosses processes is named in the room of the protocol, and nowhere else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.structure.conftest import nodes

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
