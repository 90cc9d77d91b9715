"""Cells that form and end the group themselves, as scripts do: in an exported script the group is there already.

On the notebook's ranks `init_process_group` attaches to the group, and `destroy_process_group` keeps it for the cells
that follow. The script forms the group before its first cell and ends it after its last, so it has to do the same.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from axon_nb.export.style import indented
from axon_nb.export.translate import parse

__all__ = ["with_group_kept"]

_ATTACH, _KEEP = "init_process_group", "destroy_process_group"


def with_group_kept(code: str) -> str:
    """The code with these calls, wherever it has them as statements, as a process that has a group can make them.

    Every statement of the code stays one statement.

    Args:
        code: A cell, with no two statements on one line.
    """
    if _ATTACH not in code and _KEEP not in code:
        return code
    lines = code.splitlines()
    for statement, name, module in sorted(_calls(parse(code)), key=lambda found: -found[0].lineno):
        first, last = statement.lineno - 1, statement.end_lineno or statement.lineno
        indent = lines[first][: statement.col_offset]
        if name == _KEEP:
            lines[first:last] = [f"{indent}pass  # {ast.unparse(statement)}: this script ends the group below"]
        else:
            own = indented("\n".join(lines[first:last])).splitlines()
            head = f"{indent}if not {module}.is_initialized():  # this script has formed the group above"
            lines[first:last] = [head, *own]
    return "\n".join(lines) + "\n"


def _calls(tree: ast.Module) -> Iterator[tuple[ast.stmt, str, str]]:
    """Statements that form or end the group of all ranks, each with the function's name and where it is from."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
            continue
        function = node.value.func
        if isinstance(function, ast.Attribute):
            name, module = function.attr, ast.unparse(function.value)
        else:
            name, module = getattr(function, "id", ""), "dist"
        of_torch = any(word in module.rpartition(".")[2] for word in ("dist", "c10d"))
        if of_torch and (name == _ATTACH or (name == _KEEP and _is_default(node.value))):
            yield node, name, module


def _is_default(call: ast.Call) -> bool:
    """Whether a call's group is that of all ranks: none is named, or the world."""
    groups = [*call.args, *(keyword.value for keyword in call.keywords)]
    return not groups or ast.unparse(groups[0]).rpartition(".")[2] in ("None", "WORLD")
