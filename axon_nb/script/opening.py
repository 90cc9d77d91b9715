"""Opens a function that a script calls once: its statements take the place of the call, its locals become globals.

It stays a function where that could change what the script does.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from axon_nb.export.effects import effects, free_names
from axon_nb.script.blocks import Block, body_blocks

_DROPPED_DECORATORS = ("record", "errors.record")
"""torchrun's, which writes the error of a worker to a file."""
_READS_SCOPE = ("locals", "vars", "globals", "eval", "exec")
_OWN_SCOPE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_EXITS = ("sys.exit", "exit", "quit", "SystemExit")


@dataclass(frozen=True)
class Call:
    """A statement that is a call of a function of the script."""

    name: str
    node: ast.Call
    target: ast.expr | None
    """What receives its value; None: nothing does."""


def find_call(statement: ast.stmt) -> Call | None:
    """Return the call if a statement is ``f(…)``, ``x = f(…)`` or ``sys.exit(f(…))``."""
    value: ast.expr | None = None
    target: ast.expr | None = None
    if isinstance(statement, ast.Expr):
        value = statement.value
        if isinstance(value, ast.Call) and ast.unparse(value.func) in _EXITS and len(value.args) == 1:
            value = value.args[0]
    elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        value, target = statement.value, statement.targets[0]
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        return Call(value.func.id, value, target)
    return None


def is_training(function: Block, names: set[str]) -> bool:
    """Whether a function is part of the script's course, rather than a helper.

    Args:
        function: The function.
        names: Names of the script's functions.
    """
    node = function.node
    assert isinstance(node, ast.FunctionDef)
    if node.name == "main" or any(f"{word}(" in function.text for word in (".backward", "process_group")):
        return True
    calls = [inner.func for inner in ast.walk(node) if isinstance(inner, ast.Call)]
    return any(isinstance(called, ast.Name) and called.id in names for called in calls)


def why_closed(function: Block, call: Call, before: Sequence[Block], after: Sequence[Block]) -> str:
    """Return why a function is not opened; empty if it can be.

    Args:
        function: The function.
        call: Its call.
        before: The other statements up to the call.
        after: The statements after it.
    """
    node = function.node
    assert isinstance(node, ast.FunctionDef)
    nodes = list(_own_nodes(node))
    returns = [inner for inner in nodes if isinstance(inner, ast.Return)]
    arguments = node.args
    everywhere = [inner for block in (*before, function, *after) for inner in ast.walk(block.node)]
    if any(isinstance(inner, ast.Name) and inner.id == node.name for inner in everywhere):
        return "it is used in more than one place"
    if any(ast.unparse(decorator) not in _DROPPED_DECORATORS for decorator in node.decorator_list):
        return f"@{ast.unparse(node.decorator_list[0])} changes it"
    if any(isinstance(inner, (ast.Yield, ast.YieldFrom, ast.Await)) for inner in nodes):
        return "it is a generator"
    if [inner for inner in returns if inner is not node.body[-1]]:
        return "it returns before its end"
    if any(isinstance(inner, ast.Nonlocal) for inner in ast.walk(node)):
        return "an inner function changes its variables"
    if any(isinstance(inner, ast.Name) and inner.id in _READS_SCOPE for inner in ast.walk(node)):
        return "it looks at its variables as a whole"
    if arguments.vararg or arguments.kwarg or arguments.posonlyargs or _has_stars(call.node):
        return "it takes any number of arguments"
    if (bindings := _bindings(node, call)) is None:
        return "its arguments are not those of its call, or a default is not a literal"
    locals_ = effects(node.body).binds | {name for name, value in bindings if ast.unparse(value) != name}
    locals_ -= _same_imports(node, before)
    shared = sorted(locals_ & _reads(before, after))
    return f"its variable {shared[0]} would change that of the script" if shared else ""


def open_function(function: Block, call: Call) -> list[Block]:
    """Return the statements that take the place of a call; `why_closed` must be empty."""
    node = function.node
    assert isinstance(node, ast.FunctionDef)
    blocks = body_blocks(function)
    if blocks and isinstance(blocks[-1].node, ast.Return):
        blocks[-1:] = _returned(blocks[-1].node.value, call.target)
    elif call.target is not None:
        blocks.append(Block.parse(f"{ast.unparse(call.target)} = None"))
    pairs = [(name, ast.unparse(value)) for name, value in _bindings(node, call) or []]
    pairs = [(name, text) for name, text in pairs if name != text]
    names, texts = {name for name, _ in pairs}, " ".join(text for _, text in pairs)
    if names & {
        inner.id for inner in ast.walk(ast.parse(f"[{', '.join(t for _, t in pairs)}]")) if isinstance(inner, ast.Name)
    }:
        head = [f"{', '.join(name for name, _ in pairs)} = {', '.join(text for _, text in pairs)}"] if texts else []
    else:
        head = [f"{name} = {text}" for name, text in pairs]
    return [*map(Block.parse, head), *blocks]


def _returned(value: ast.expr | None, target: ast.expr | None) -> list[Block]:
    text = "None" if value is None else ast.unparse(value)
    if target is not None:
        return [] if ast.unparse(target) == text else [Block.parse(f"{ast.unparse(target)} = {text}")]
    return [] if value is None or isinstance(value, (ast.Constant, ast.Name, ast.Tuple)) else [Block.parse(text)]


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a function, but not those of inner functions and classes."""
    waiting = list(getattr(function, "body", []))
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, _OWN_SCOPE):
            waiting += ast.iter_child_nodes(node)


def _has_stars(call: ast.Call) -> bool:
    return any(isinstance(item, ast.Starred) for item in call.args) or any(k.arg is None for k in call.keywords)


def _bindings(function: ast.FunctionDef, call: ast.Call | Call) -> list[tuple[str, ast.expr]] | None:
    """Each parameter with its value; None if one has none, or its default is computed."""
    node = call.node if isinstance(call, Call) else call
    parameters = function.args.args
    names = [parameter.arg for parameter in (*parameters, *function.args.kwonlyargs)]
    values: dict[str, ast.expr] = dict(
        zip(
            [parameter.arg for parameter in parameters][len(parameters) - len(function.args.defaults) :],
            function.args.defaults,
            strict=True,
        )
    )
    values |= {p.arg: d for p, d in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True) if d}
    if len(node.args) > len(parameters) or any(not isinstance(d, ast.Constant) for d in values.values()):
        return None
    values |= {parameter.arg: value for parameter, value in zip(parameters, node.args, strict=False)}
    values |= {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg in names}
    if len(values) < len(names) or any(keyword.arg not in names for keyword in node.keywords):
        return None
    return [(name, values[name]) for name in names]


def _same_imports(function: ast.FunctionDef, before: Sequence[Block]) -> set[str]:
    """Names that a function imports as the script has imported them."""
    imported = {
        (ast.unparse(alias), getattr(block.node, "module", ""))
        for block in before
        if isinstance(block.node, (ast.Import, ast.ImportFrom))
        for alias in block.node.names
    }
    return {
        alias.asname or alias.name.partition(".")[0]
        for node in _own_nodes(function)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
        if (ast.unparse(alias), getattr(node, "module", "")) in imported
    }


def _reads(before: Sequence[Block], after: Sequence[Block]) -> set[str]:
    """Names whose values in the script somebody reads after the call: functions, or later statements."""
    free = set[str]()
    for block in (*before, *after):
        for node in ast.walk(block.node):
            if isinstance(node, _OWN_SCOPE):
                free |= free_names(node)
    total = effects([block.node for block in after])
    return free | total.uses | (total.changes - total.replaces)
