"""Which cells the end of a session depends on, and which statements of the notebook made a value."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence

from axon_nb.export.flow import called_names, effects, free_names

__all__ = ["live_cells", "making_of"]

_TRAINS = {"backward", "step"}
_WRITES = ("save", "write", "dump", "to_csv", "to_parquet", "log", "export")


def live_cells(trees: Sequence[ast.Module], wanted: Mapping[int, Iterable[str]], *, given: Iterable[str]) -> list[bool]:
    """Whether each cell is live: the last one, the last that trains, each that writes, and what these depend on.

    Args:
        trees: The cells, in order.
        wanted: Names that are needed after the cell of an index, such as those that the notebook fetched.
        given: Names that every rank has anyway, and imported modules.
    """
    known = set(given)
    all_effects = [effects(tree.body) for tree in trees]
    statements = [statement for tree in trees for statement in tree.body]
    functions = called_names(statements)
    functions |= {s.name for s in statements if isinstance(s, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))}
    sources = _sources(trees, known)
    trains = [index for index, tree in enumerate(trees) if _calls(tree) & _TRAINS]
    roots = {len(trees) - 1, *trains[-1:]}
    roots |= {index for index, tree in enumerate(trees) if any(name.startswith(_WRITES) for name in _calls(tree))}
    live = [False] * len(trees)
    needed: set[str] = set()
    for index in range(len(trees) - 1, -1, -1):
        needed |= set(wanted.get(index, ()))
        own = all_effects[index]
        touched = own.binds | (_closure(own.changes - known, sources) - functions)
        live[index] = index in roots or bool(touched & _closure(needed, sources))
        if live[index]:
            needed = (needed - own.replaces) | (own.uses - known)
    return live


def making_of(names: Iterable[str], statements: Sequence[ast.stmt]) -> tuple[list[ast.stmt], set[str]]:
    """The statements that the values of `names` come from, in order, and the names that none of them gives.

    Args:
        names: The values' names.
        statements: All that ran before, in order.
    """
    needed, chosen = set(names), []
    for statement in reversed(statements):
        own = effects([statement])
        if own.binds & needed or (_changes_in_place(statement) and own.changes & needed):
            chosen.append(statement)
            needed = (needed - own.replaces) | own.uses
    return chosen[::-1], needed


def _changes_in_place(statement: ast.stmt) -> bool:
    """Whether a statement is there for what it changes: an assignment into an object, or a call by itself."""
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call)
    return isinstance(statement, (ast.Assign, ast.AugAssign, ast.For, ast.While, ast.With, ast.If, ast.Delete))


def _calls(tree: ast.Module) -> set[str]:
    """The names of all methods and functions that are called."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            found.add(function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", ""))
    return found


def _sources(trees: Iterable[ast.AST], known: set[str]) -> dict[str, set[str]]:
    """What each name's object may hold: the names in what is assigned to it; what a loop goes through is not held."""
    found: dict[str, set[str]] = {}
    for node in (node for tree in trees for node in ast.walk(tree)):
        targets: list[ast.expr] = []
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.setdefault(node.name, set()).update(free_names(node) - known)
        elif isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
            targets = [node.target]
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            targets = [node.optional_vars]
        value = getattr(node, "context_expr", getattr(node, "value", None))
        if targets and value is not None:
            held = effects([ast.Expr(value)]).uses - known
            for name in (inner.id for target in targets for inner in ast.walk(target) if isinstance(inner, ast.Name)):
                found.setdefault(name, set()).update(held)
    return found


def _closure(names: Iterable[str], sources: Mapping[str, set[str]]) -> set[str]:
    reached, waiting = set[str](), list(names)
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += sources.get(name, ())
    return reached
