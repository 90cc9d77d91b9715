"""Which cells the final state depends on, and which statements produced a value."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence

from axon_nb.export.effects import effects, free_names

_TRAINS = {"backward", "step"}
_WRITES = ("save", "write", "dump", "to_csv", "to_parquet", "log", "export")


def _called_names(statements: Iterable[ast.stmt]) -> set[str]:
    """Return names that are only called, never used otherwise."""
    nodes = [node for statement in statements for node in ast.walk(statement)]
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    names = [node for node in nodes if isinstance(node, ast.Name)]
    otherwise = {node.id for node in names if id(node) not in called}
    return {node.id for node in names} - otherwise


def live_cells(
    trees: Sequence[ast.Module], wanted: Mapping[int, Iterable[str]], *, predefined: Iterable[str]
) -> list[bool]:
    """Determine which cells are live: the last one, the last that trains, all that write, and their dependencies.

    Args:
        trees: The cells, in order.
        wanted: Names needed after a cell, by its index, such as those that the notebook fetched.
        predefined: Names that every rank has, and imported modules.
    """
    known = set(predefined)
    all_effects = [effects(tree.body) for tree in trees]
    statements = [statement for tree in trees for statement in tree.body]
    functions = _called_names(statements)
    functions |= {s.name for s in statements if isinstance(s, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))}
    sources = _references(trees, known)
    trains = [index for index, tree in enumerate(trees) if _calls(tree) & _TRAINS]
    roots = {len(trees) - 1, *trains[-1:]}
    roots |= {index for index, tree in enumerate(trees) if any(name.startswith(_WRITES) for name in _calls(tree))}
    live = [False] * len(trees)
    needed: set[str] = set()
    for index in range(len(trees) - 1, -1, -1):
        needed |= set(wanted.get(index, ()))
        cell_effects = all_effects[index]
        touched = cell_effects.binds | (_closure(cell_effects.changes - known, sources) - functions)
        live[index] = index in roots or bool(touched & _closure(needed, sources))
        if live[index]:
            needed = (needed - cell_effects.replaces) | (cell_effects.uses - known)
    return live


def defining_statements(names: Iterable[str], statements: Sequence[ast.stmt]) -> tuple[list[ast.stmt], set[str]]:
    """Find the statements that produce the values of `names`, in order, and the names still undefined before them.

    Args:
        names: Names of the values.
        statements: All statements that ran before, in order.
    """
    needed, selected = set(names), []
    for statement in reversed(statements):
        cell_effects = effects([statement])
        if cell_effects.binds & needed or (_changes_in_place(statement) and cell_effects.changes & needed):
            selected.append(statement)
            needed = (needed - cell_effects.replaces) | cell_effects.uses
    return selected[::-1], needed


def _changes_in_place(statement: ast.stmt) -> bool:
    """Whether a statement exists for its side effects, such as an assignment into an object or a bare call."""
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call)
    return isinstance(statement, (ast.Assign, ast.AugAssign, ast.For, ast.While, ast.With, ast.If, ast.Delete))


def _calls(tree: ast.Module) -> set[str]:
    """Names of all called functions and methods."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            names.add(function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", ""))
    return names


def _references(trees: Iterable[ast.AST], known: set[str]) -> dict[str, set[str]]:
    """Names that each name's object may refer to: those in expressions assigned to it, but not what loops iterate."""
    names: dict[str, set[str]] = {}
    for node in (node for tree in trees for node in ast.walk(tree)):
        targets: list[ast.expr] = []
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.setdefault(node.name, set()).update(free_names(node) - known)
        elif isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
            targets = [node.target]
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            targets = [node.optional_vars]
        value = getattr(node, "context_expr", getattr(node, "value", None))
        if targets and value is not None:
            referenced = effects([ast.Expr(value)]).uses - known
            for name in (inner.id for target in targets for inner in ast.walk(target) if isinstance(inner, ast.Name)):
                names.setdefault(name, set()).update(referenced)
    return names


def _closure(names: Iterable[str], sources: Mapping[str, set[str]]) -> set[str]:
    reached, waiting = set[str](), list(names)
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += sources.get(name, ())
    return reached
