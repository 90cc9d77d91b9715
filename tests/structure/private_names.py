"""Finds where code uses private names of other packages, as far as its text shows."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence

_PACKAGES = ("IPython", "accelerate", "deepspeed", "ipykernel", "ipyparallel", "ipywidgets", "torch", "tqdm")
_MODULE = re.compile(rf"(?:{'|'.join(_PACKAGES)})(?:\.\w+)+")
_BY_NAME = {"delattr", "getattr", "hasattr", "setattr"}


def _is_private(name: str) -> bool:
    """Whether a name is private: not a dunder, and not a protocol such as `_repr_html_`."""
    return name.startswith("_") and not name.endswith("_")


def names_of(path: str) -> set[str]:
    """The private parts of a dotted path."""
    return {part for part in re.split(r"\W+", path) if _is_private(part)}


def own_names(nodes: Sequence[ast.AST]) -> set[str]:
    """The private names that a file defines: functions, classes, variables, slots, attributes of its objects."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            names.add(node.attr)
    return set(filter(_is_private, names))


def _is_own(owner: ast.expr) -> bool:
    return isinstance(owner, ast.Name) and owner.id in {"cls", "self"}


def _aliases(nodes: Sequence[ast.AST]) -> dict[str, str]:
    """Dotted names of what a file imports from other packages, by the names that it uses."""
    found: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update({each.asname or each.name.partition(".")[0]: each.name for each in node.names})
        elif isinstance(node, ast.ImportFrom):
            found.update({each.asname or each.name: f"{node.module}.{each.name}" for each in node.names})
    for node in nodes:  # c10d = dist.distributed_c10d
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Attribute):
            root = ast.unparse(node.value).partition(".")[0]
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if root in found and isinstance(target, ast.Name):
                    found[target.id] = f"{found[root]}.{node.value.attr}"
    return {name: path for name, path in found.items() if path.partition(".")[0] not in {"__future__", "axon_nb"}}


def _first_name(owner: ast.expr) -> str:
    """The name that an expression begins with; empty if it begins with something else."""
    while isinstance(owner, ast.Attribute | ast.Call | ast.Subscript):
        owner = owner.func if isinstance(owner, ast.Call) else owner.value
    return owner.id if isinstance(owner, ast.Name) else re.split(r"\W", ast.unparse(owner), maxsplit=1)[0]


def private_uses(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str, bool]]:
    """Find private names in use, and names of other packages that are replaced.

    Args:
        nodes: All nodes of a file's syntax tree, breadth first.

    Yields:
        The line, the name, and whether the name certainly belongs to another package.
    """
    aliases = _aliases(nodes)

    def is_foreign(owner: ast.expr) -> bool:
        return _first_name(owner) in aliases

    for node in nodes:
        if isinstance(node, ast.Attribute) and not _is_own(node.value):
            foreign = is_foreign(node.value)
            replaced = foreign and not isinstance(node.ctx, ast.Load) and not _is_standard(node.value, aliases)
            if _is_private(node.attr) or replaced:
                yield node.lineno, node.attr, foreign
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _BY_NAME:
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str) and _is_private(name.value):
                yield node.lineno, name.value, is_foreign(node.args[0])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _MODULE.fullmatch(node.value):
            yield from ((node.lineno, name, True) for name in names_of(node.value))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            paths = [f"{base}{each.name}" for each in node.names]
            for path in paths:
                if path.partition(".")[0] not in {"__future__", "axon_nb"}:
                    yield from ((node.lineno, name, True) for name in names_of(path))


def _is_standard(owner: ast.expr, aliases: dict[str, str]) -> bool:
    root = aliases[_first_name(owner)]
    return root.partition(".")[0] in sys.stdlib_module_names
