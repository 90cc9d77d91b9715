"""Where files are and how long, and how much code each room may have: what no linter knows."""

from __future__ import annotations

import ast
import itertools
import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.room_sizes import lines_of_code
from tests.structure.conftest import source_files, syntax
from tests.support.node import node as run_node

MAX_LINES = 600
MAX_FILES = 15
"""Python files in a room, `__init__.py` included."""
MEDIAN_FILES = 10

LONG_FILES: dict[str, str] = {
    "examples/11_the_guide.py": "one notebook that is read from its first page to its last, mostly text",
}
"""Files that may be longer than `MAX_LINES`, each with the reason why it is one file."""

in_a_clone = pytest.mark.skipif(
    not (Path(__file__).resolve().parents[2] / ".git").exists(),
    reason="a source archive holds real files in place of the link",
)

MAX_FUNCTION_LINES = 60


@in_a_clone
def test_magics_are_the_same_files_under_both_paths(root: Path) -> None:
    link = root / "axon_nb" / "magics"
    assert link.is_symlink()
    assert link.samefile(root / "magics")
    assert not Path(link.readlink()).is_absolute()


@in_a_clone
def test_magics_import_as_part_of_the_package(root: Path) -> None:
    import axon_nb.magics

    assert Path(axon_nb.magics.__file__).samefile(root / "magics" / "__init__.py")
    assert "magics" not in sys.modules


def test_linter_refuses_magics_under_its_folder_name(root: Path) -> None:
    for line in ("import magics", "from magics import distributed", "from magics.distributed import DistributedMagics"):
        found = subprocess.run(
            [sys.executable, "-m", "ruff", "check", "--select=TID251", "--stdin-filename=axon_nb/sample.py", "-"],
            input=f"{line}\n",
            cwd=root,
            capture_output=True,
            text=True,
            check=False,
        )
        assert found.returncode == 1, line
        assert "import axon_nb.magics" in found.stdout


def test_files_are_short_or_listed(root: Path) -> None:
    lines = {path.relative_to(root).as_posix(): len(path.read_text("utf-8").splitlines()) for path in source_files()}
    long = {name: count for name, count in lines.items() if count > MAX_LINES and name not in LONG_FILES}
    assert not long, f"more than {MAX_LINES} lines: split each by subject, or list it"
    short = [name for name in LONG_FILES if lines.get(name, 0) <= MAX_LINES]
    assert not short, f"short again: remove them from LONG_FILES: {short}"


def test_program_begins_after_all_that_its_file_defines(root: Path) -> None:
    early = [
        path.relative_to(root).as_posix()
        for path in source_files()
        if "__main__" in path.read_text("utf-8")
        for statement in syntax(path).body[:-1]
        if isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)
    ]
    assert not early, "as a program, these files run before their end is defined: move `if __name__` there"


def rooms(root: Path) -> dict[str, int]:
    """Number of Python files by folder of the package and of the tests."""
    folders = [folder for top in ("axon_nb", "magics", "tests") for folder in (root / top, *(root / top).rglob("*"))]
    counts = {folder: len(list(folder.glob("*.py"))) for folder in folders if folder.is_dir()}
    return {folder.relative_to(root).as_posix(): count for folder, count in counts.items() if count}


def test_room_has_few_files(root: Path) -> None:
    found = rooms(root)
    full = {room: count for room, count in found.items() if count > MAX_FILES}
    assert not full, f"more than {MAX_FILES} files: split each by the nouns of its domain"
    assert statistics.median(found.values()) <= MEDIAN_FILES


def public_definitions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """The public functions and classes of a module, and the public methods of those classes."""
    found = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            found.append(node)
            found.extend(
                method
                for method in getattr(node, "body", [])
                if isinstance(node, ast.ClassDef)
                and isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
                and not method.name.startswith("_")
            )
    return found


def repeats_an_explained_name(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    """Whether a decorator says that the documentation is elsewhere: an override, an overload, a property's setter."""
    names = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
    return bool(names & {"override", "overload", "setter", "deleter"})


def test_public_definitions_have_docstrings(package_files: list[Path], root: Path) -> None:
    bare = []
    for path in package_files:
        tree = syntax(path)
        bare += [] if ast.get_docstring(tree) else [f"{path.relative_to(root)}"]
        bare += [
            f"{path.relative_to(root)}:{node.lineno} {node.name}"
            for node in public_definitions(tree)
            if not ast.get_docstring(node) and not repeats_an_explained_name(node)
        ]
    assert not bare, "without a docstring:\n" + "\n".join(bare)


DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
SEAMS = ("axon_nb/comm/collectives/direct.py",)
"""A file whose `missing_hooks` looks up its own function."""


def names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    """The names that a statement reads (`ast.Load`) or binds (`ast.Store`)."""
    return {item.id for item in ast.walk(node) if isinstance(item, ast.Name) and isinstance(item.ctx, context)}


def misplaced_constants(tree: ast.Module) -> list[str]:
    """The constants after a module's first function or class that need nothing from there, as source."""
    statements = itertools.dropwhile(lambda statement: not isinstance(statement, DEFINITIONS), tree.body)
    bound: set[str] = set()
    misplaced = []
    for statement in statements:
        if isinstance(statement, DEFINITIONS):
            bound.add(statement.name)
        elif isinstance(statement, ast.AnnAssign | ast.Assign):
            parts = [statement.target] if isinstance(statement, ast.AnnAssign) else statement.targets  # no annotation
            if any(names(part, ast.Load) & bound for part in (*parts, statement.value) if part is not None):
                bound |= names(statement, ast.Store)
            else:
                misplaced.append(ast.unparse(statement))
        else:
            bound |= names(statement, ast.Store)
    return misplaced


def test_constants_stand_above_the_first_function(package_files: list[Path], root: Path) -> None:
    misplaced = {
        path.relative_to(root).as_posix(): constants
        for path in package_files
        if (constants := misplaced_constants(syntax(path)))
    }
    misplaced = {name: constants for name, constants in misplaced.items() if not name.startswith(SEAMS)}
    assert not misplaced, "move them to the top, or split the file where its purposes part"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("LIMIT = 1\ndef f(): ...", []),
        ("def f(): ...\nLIMIT = 1", ["LIMIT = 1"]),
        ("class A: ...\nLIMIT: int = 1\ndef f(): ...", ["LIMIT: int = 1"]),
        ("def f(): ...\nTABLE = {1: f}\nKEYS = tuple(TABLE)", []),
        ("class A: ...\nA.limit = 1", []),
        ("class A: ...\nitems: list[A] = []", ["items: list[A] = []"]),
    ],
)
def test_misplaced_constants_are_found(source: str, expected: list[str]) -> None:
    assert misplaced_constants(ast.parse(source)) == expected


def test_lines_without_code_do_not_count() -> None:
    source = """'A module.'

# A comment.
x = 1  # one


def f():
    'Doc.'
    return (
        x
    )
"""
    assert lines_of_code(source) == 5


@pytest.fixture
def modules(root: Path) -> list[Path]:
    """All modules of the widgets and of the panel in JupyterLab."""
    return sorted((root / "axon_nb").rglob("static/**/*.js"))


def test_modules_are_short(modules: list[Path]) -> None:
    lengths = {path.as_posix(): len(path.read_text(encoding="utf-8").splitlines()) for path in modules}
    assert {path: lines for path, lines in lengths.items() if lines > MAX_LINES} == {}


def test_modules_are_checked_by_typescript(modules: list[Path]) -> None:
    assert [path for path in modules if not path.read_text(encoding="utf-8").startswith("// @ts-check\n")] == []


def test_functions_are_short(modules: list[Path], root: Path) -> None:
    if not (root / "node_modules" / "typescript").is_dir():
        pytest.skip("needs typescript: scripts/check_javascript installs it")
    functions = json.loads(run_node(str(root / "tests/js/functions.mjs"), *map(str, modules)))
    found = {(Path(path).name, name) for path, name, _, _ in functions}
    known = {("store.js", "merge"), ("view.js", "constructor"), ("view.js", "draw"), ("wire.js", "sendIfVisible")}
    assert known <= found
    long = [
        f"{Path(path).relative_to(root)}:{line} {name} has {lines} lines"
        for path, name, line, lines in functions
        if lines > MAX_FUNCTION_LINES
    ]
    assert long == [], f"at most {MAX_FUNCTION_LINES}: split them"
