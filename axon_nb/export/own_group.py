"""Guards cells' own calls of `init_process_group` and `destroy_process_group` in an exported script.

On the notebook's ranks the former attaches to the existing group, and the latter keeps it for later cells. The script
creates the group before the first cell and destroys it after the last, so these calls must not do so again.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from axon_nb.export.style import indent_code
from axon_nb.export.translate import parse

__all__ = ["guard_group_calls"]

_INIT, _DESTROY = "init_process_group", "destroy_process_group"


def guard_group_calls(code: str) -> str:
    """Guard these calls, wherever they are statements, for a process that already has a group.

    Every statement of the code stays one statement.

    Args:
        code: A cell with one statement per line.
    """
    if _INIT not in code and _DESTROY not in code:
        return code
    lines = code.splitlines()
    for statement, name, module in sorted(_calls(parse(code)), key=lambda found: -found[0].lineno):
        first, last = statement.lineno - 1, statement.end_lineno or statement.lineno
        indent = lines[first][: statement.col_offset]
        if name == _DESTROY:
            lines[first:last] = [f"{indent}pass  # {ast.unparse(statement)}: this script destroys the group below"]
        else:
            own = indent_code("\n".join(lines[first:last])).splitlines()
            head = f"{indent}if not {module}.is_initialized():  # this script created the group above"
            lines[first:last] = [head, *own]
    return "\n".join(lines) + "\n"


def _calls(tree: ast.Module) -> Iterator[tuple[ast.stmt, str, str]]:
    """Statements that create or destroy the default group, each with the function's name and its module."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
            continue
        function = node.value.func
        if isinstance(function, ast.Attribute):
            name, module = function.attr, ast.unparse(function.value)
        else:
            name, module = getattr(function, "id", ""), "dist"
        of_torch = any(word in module.rpartition(".")[2] for word in ("dist", "c10d"))
        if of_torch and (name == _INIT or (name == _DESTROY and _is_default(node.value))):
            yield node, name, module


def _is_default(call: ast.Call) -> bool:
    """Whether a call is about the default group: it names none, or the world."""
    groups = [*call.args, *(keyword.value for keyword in call.keywords)]
    return not groups or ast.unparse(groups[0]).rpartition(".")[2] in ("None", "WORLD")
