"""The files and modules of the project."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "axon_nb"
SOURCE_FOLDERS = ("axon_nb", "benchmarks", "course", "examples", "magics", "scripts", "tests")


def package_files() -> list[Path]:
    """Every module of the package; those of the magics by the name that they are imported by."""
    files = [*PACKAGE.rglob("*.py"), *(PACKAGE / "magics").rglob("*.py")]
    return sorted({path for path in files if "__pycache__" not in path.parts})


def source_files() -> list[Path]:
    """Every Python file of the project, each once."""
    files = {path for folder in SOURCE_FOLDERS for path in (ROOT / folder).rglob("*.py")}
    return sorted(path for path in files if "axon_nb/magics" not in path.as_posix())


def module_name(path: Path) -> str:
    """The dotted name that a file of the package is imported by."""
    dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return re.sub(r"\.__init__$", "", dotted)


@functools.cache
def syntax(path: Path) -> ast.Module:
    """The syntax tree of a file. Tests share it: do not change it."""
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file's syntax tree, breadth first."""
    return tuple(ast.walk(syntax(path)))


@pytest.fixture(scope="session", name="package_files")
def all_package_files() -> list[Path]:
    """Every module of the package."""
    return package_files()


@pytest.fixture(scope="session")
def root() -> Path:
    """The folder of the project."""
    return ROOT
