"""Effects of statements, from the syntax tree alone: names they bind, use and may mutate; which cells are live."""

from __future__ import annotations

import ast
import builtins
import symtable
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct, field

_PURE_FUNCTIONS = {
    "abs", "all", "any", "bool", "enumerate", "float", "format", "hasattr", "id", "int", "isinstance", "issubclass",
    "len", "max", "min", "print", "range", "repr", "reversed", "round", "sorted", "str", "sum", "tuple", "type", "zip",
}  # fmt: skip
_PURE_METHODS = {
    "all", "any", "argmax", "count", "cpu", "detach", "dim", "element_size", "format", "get_rank", "get_world_size",
    "item", "items", "join", "keys", "max", "mean", "min", "named_parameters", "norm", "numel", "numpy", "parameters",
    "size", "split", "state_dict", "std", "sum", "tolist", "values",
}  # fmt: skip
"""Methods that do not mutate their object."""
_BLOCKS = (ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.Try, ast.ExceptHandler)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SIMPLE_BINDINGS = (
    ast.Assign,
    ast.AnnAssign,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Import,
    ast.ImportFrom,
)
_TRAINS = {"backward", "step"}
_WRITES = ("save", "write", "dump", "to_csv", "to_parquet", "log", "export")


class Effects(Struct):
    """Effects of statements on names."""

    binds: set[str] = field(default_factory=set)
    uses: set[str] = field(default_factory=set)
    """Names whose previous values are needed."""
    changes: set[str] = field(default_factory=set)
    replaces: set[str] = field(default_factory=set)
    """Names that are always rebound without using their previous values."""

    def then(self, other: Effects) -> Effects:
        """Combine the effects of this statement followed by another."""
        return Effects(
            self.binds | other.binds,
            self.uses | (other.uses - self.replaces),
            self.changes | other.changes,
            self.replaces | (other.replaces - self.uses),
        )


class _EffectsVisitor(ast.NodeVisitor):
    """Collects the effects of one statement."""

    def __init__(self) -> None:
        self.effects = Effects()

    def visit(self, node: ast.AST) -> None:
        """Add the effects of one node."""
        if isinstance(node, ast.Name):
            (self.effects.uses if isinstance(node.ctx, ast.Load) else self.effects.binds).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            self.effects.binds.add(node.name)
            self.effects.uses |= free_names(node)
        elif isinstance(node, ast.Lambda):
            self.effects.uses |= free_names(node)
        elif isinstance(node, _COMPREHENSIONS):
            self.effects.uses |= free_names(node)
            for inner in ast.walk(node):
                if isinstance(inner, ast.Call):
                    self._call(inner)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            self.effects.binds |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, _BLOCKS):
            self._block(node)
        else:
            self._plain(node)

    def _plain(self, node: ast.AST) -> None:
        if isinstance(node, ast.Call):
            self._call(node)
        elif isinstance(node, ast.AugAssign):
            self._change(node.target)
            self.effects.uses |= set(_bases(node.target))
        elif isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
            self._change(node)
        self.generic_visit(node)

    def _block(self, node: ast.AST) -> None:
        """Add a compound statement: what its header and earlier blocks bind is visible in later blocks."""
        inside = {id(statement) for block in _blocks(node) for statement in block}
        for child in ast.iter_child_nodes(node):
            if id(child) not in inside:
                self.visit(child)
        bound = set(self.effects.binds)
        if isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
        for block in _blocks(node):
            inner = _sequence_effects(block)
            self.effects.binds |= inner.binds | bound
            self.effects.uses |= inner.uses - bound
            self.effects.changes |= inner.changes

    def _change(self, node: ast.expr) -> None:
        self.effects.changes |= set(_bases(node))

    def _call(self, node: ast.Call) -> None:
        function = node.func
        if isinstance(function, ast.Name) and function.id in _PURE_FUNCTIONS:
            return
        if isinstance(function, ast.Attribute) and function.attr in _PURE_METHODS:
            return
        self._change(function)
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            self._change(argument.value if isinstance(argument, ast.Starred) else argument)


def _blocks(node: ast.AST) -> list[list[ast.stmt]]:
    return [getattr(node, name) for name in ("body", "orelse", "finalbody") if getattr(node, name, None)]


def _bases(node: ast.expr) -> Iterator[str]:
    """Names at the root of an expression: `model` in ``model.layers[0].weight``."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, (ast.Attribute, ast.Subscript)):
        yield from _bases(node.value)
    elif isinstance(node, ast.Call):
        yield from _bases(node.func)
    elif isinstance(node, (ast.Tuple, ast.List)):
        for item in node.elts:
            yield from _bases(item)


class _Generators(ast.NodeTransformer):
    """Turns comprehensions into generators: Python 3.12 and later inline the others into the enclosing scope."""

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp) -> ast.AST:
        return self.generic_visit(ast.GeneratorExp(node.elt, node.generators))

    visit_SetComp = visit_ListComp

    def visit_DictComp(self, node: ast.DictComp) -> ast.AST:
        pair = ast.Tuple([node.key, node.value], ast.Load())
        return self.generic_visit(ast.GeneratorExp(pair, node.generators))


def free_names(node: ast.AST) -> set[str]:
    """Return the names that a function, class or comprehension takes from the enclosing scope."""
    try:
        tree = _Generators().visit(ast.parse(ast.unparse(node)))
        scopes = [symtable.symtable(ast.unparse(tree), "<cell>", "exec")]
    except SyntaxError:  # `await` outside a function
        return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load)}
    names, outermost = set[str](), scopes[0]
    while scopes:
        scope = scopes.pop()
        scopes += scope.get_children()
        for symbol in scope.get_symbols():
            outer = symbol.is_global() or (scope is outermost and not symbol.is_assigned())
            if outer and (symbol.is_referenced() or symbol.is_declared_global()):
                names.add(symbol.get_name())
    return names - {getattr(node, "name", "")}


def _sequence_effects(statements: Iterable[ast.stmt]) -> Effects:
    total = Effects()
    for statement in statements:
        visitor = _EffectsVisitor()
        visitor.visit(statement)
        step = visitor.effects
        if isinstance(statement, _SIMPLE_BINDINGS):
            step.replaces = step.binds - step.uses
        total = total.then(step)
    return total


def effects(statements: Iterable[ast.stmt]) -> Effects:
    """Return the combined effects of consecutive statements, without builtins."""
    total = _sequence_effects(statements)
    known = set(dir(builtins))
    total.uses -= known - total.binds
    total.changes -= known - total.binds
    return total


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


def called_name(call: ast.Call) -> str:
    """Return the last name of what is called; empty if it has none."""
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _calls(tree: ast.Module) -> set[str]:
    """Names of all called functions and methods."""
    return {called_name(node) for node in ast.walk(tree) if isinstance(node, ast.Call)}


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
