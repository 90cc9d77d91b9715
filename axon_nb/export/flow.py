"""What a statement does to names: which it binds, uses, and may change in place. Read from the syntax tree alone."""

from __future__ import annotations

import ast
import builtins
import symtable
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

__all__ = ["Effects", "called_names", "effects", "free_names"]

_HARMLESS = {
    "abs", "all", "any", "bool", "enumerate", "float", "format", "hasattr", "id", "int", "isinstance", "issubclass",
    "len", "max", "min", "print", "range", "repr", "reversed", "round", "sorted", "str", "sum", "tuple", "type", "zip",
}  # fmt: skip
_LOOKING = {
    "all", "any", "argmax", "count", "cpu", "detach", "dim", "element_size", "format", "get_rank", "get_world_size",
    "item", "items", "join", "keys", "max", "mean", "min", "named_parameters", "norm", "numel", "numpy", "parameters",
    "size", "split", "state_dict", "std", "sum", "tolist", "values",
}  # fmt: skip
"""Methods that change nothing."""
_BLOCKS = (ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.Try, ast.ExceptHandler)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_WHOLE = (
    ast.Assign,
    ast.AnnAssign,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Import,
    ast.ImportFrom,
)


@dataclass
class Effects:
    """See the module."""

    binds: set[str] = field(default_factory=set)
    uses: set[str] = field(default_factory=set)
    """Names whose values from before it needs."""
    changes: set[str] = field(default_factory=set)
    replaces: set[str] = field(default_factory=set)
    """Names that it binds whatever happens, and without looking at what they were."""

    def then(self, other: Effects) -> Effects:
        """The effects of this and then the other."""
        return Effects(
            self.binds | other.binds,
            self.uses | (other.uses - self.replaces),
            self.changes | other.changes,
            self.replaces | (other.replaces - self.uses),
        )


class _Names(ast.NodeVisitor):
    """Collects the effects of one statement."""

    def __init__(self) -> None:
        self.found = Effects()

    def visit(self, node: ast.AST) -> None:
        """Take in one node."""
        if isinstance(node, ast.Name):
            (self.found.uses if isinstance(node.ctx, ast.Load) else self.found.binds).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            self.found.binds.add(node.name)
            self.found.uses |= free_names(node)
        elif isinstance(node, ast.Lambda):
            self.found.uses |= free_names(node)
        elif isinstance(node, _COMPREHENSIONS):
            self.found.uses |= free_names(node)
            for inner in ast.walk(node):
                if isinstance(inner, ast.Call):
                    self._call(inner)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            self.found.binds |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, _BLOCKS):
            self._block(node)
        else:
            self._plain(node)

    def _plain(self, node: ast.AST) -> None:
        if isinstance(node, ast.Call):
            self._call(node)
        elif isinstance(node, ast.AugAssign):
            self._change(node.target)
            self.found.uses |= set(_bases(node.target))
        elif isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
            self._change(node)
        self.generic_visit(node)

    def _block(self, node: ast.AST) -> None:
        """A statement with blocks: what its head binds, and each block before, is there in what follows within it."""
        inside = {id(statement) for block in _blocks(node) for statement in block}
        for child in ast.iter_child_nodes(node):
            if id(child) not in inside:
                self.visit(child)
        own = set(self.found.binds)
        if isinstance(node, ast.ExceptHandler) and node.name:
            own.add(node.name)
        for block in _blocks(node):
            within = _sequence(block)
            self.found.binds |= within.binds | own
            self.found.uses |= within.uses - own
            self.found.changes |= within.changes

    def _change(self, node: ast.expr) -> None:
        self.found.changes |= set(_bases(node))

    def _call(self, node: ast.Call) -> None:
        function = node.func
        if isinstance(function, ast.Name) and function.id in _HARMLESS:
            return
        if isinstance(function, ast.Attribute) and function.attr in _LOOKING:
            return
        self._change(function)
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            self._change(argument.value if isinstance(argument, ast.Starred) else argument)


def _blocks(node: ast.AST) -> list[list[ast.stmt]]:
    return [getattr(node, name) for name in ("body", "orelse", "finalbody") if getattr(node, name, None)]


def _bases(node: ast.expr) -> Iterator[str]:
    """The names whose objects an expression leads to: `model` of ``model.layers[0].weight``."""
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
    """Makes comprehensions generators: Python 3.12 and later merge the names of the others into the scope around."""

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp) -> ast.AST:
        return self.generic_visit(ast.GeneratorExp(node.elt, node.generators))

    visit_SetComp = visit_ListComp

    def visit_DictComp(self, node: ast.DictComp) -> ast.AST:
        pair = ast.Tuple([node.key, node.value], ast.Load())
        return self.generic_visit(ast.GeneratorExp(pair, node.generators))


def free_names(node: ast.AST) -> set[str]:
    """The names that a function, class or comprehension takes from outside."""
    try:
        tree = _Generators().visit(ast.parse(ast.unparse(node)))
        scopes = [symtable.symtable(ast.unparse(tree), "<cell>", "exec")]
    except SyntaxError:  # awaits outside of a function
        return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load)}
    found, outermost = set[str](), scopes[0]
    while scopes:
        scope = scopes.pop()
        scopes += scope.get_children()
        for symbol in scope.get_symbols():
            outer = symbol.is_global() or (scope is outermost and not symbol.is_assigned())
            if outer and (symbol.is_referenced() or symbol.is_declared_global()):
                found.add(symbol.get_name())
    return found - {getattr(node, "name", "")}


def called_names(statements: Iterable[ast.stmt]) -> set[str]:
    """Names that are called, and used in no other way."""
    nodes = [node for statement in statements for node in ast.walk(statement)]
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    names = [node for node in nodes if isinstance(node, ast.Name)]
    otherwise = {node.id for node in names if id(node) not in called}
    return {node.id for node in names} - otherwise


def _sequence(statements: Iterable[ast.stmt]) -> Effects:
    total = Effects()
    for statement in statements:
        visitor = _Names()
        visitor.visit(statement)
        found = visitor.found
        if isinstance(statement, _WHOLE):
            found.replaces = found.binds - found.uses
        total = total.then(found)
    return total


def effects(statements: Iterable[ast.stmt]) -> Effects:
    """The effects of statements that run one after the other; builtins are no names."""
    total = _sequence(statements)
    known = set(dir(builtins))
    total.uses -= known - total.binds
    total.changes -= known - total.binds
    return total
