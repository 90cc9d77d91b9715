"""Variables of this rank by name, with what is reached from them by attributes and indices; nothing is called."""

from __future__ import annotations

import ast
from typing import Any

from axon_nb.errors import UsageError

__all__ = ["look_up"]


def look_up(name: str, space: dict[str, Any]) -> Any:
    """The value of a name with ``.attributes`` and constant ``[indices]`` behind it.

    Args:
        name: Such as ``model.layers[0]``.
        space: The variables.

    Raises:
        UsageError: there is no such variable, or it is more than a name.
    """
    try:
        node = ast.parse(name, mode="eval").body
    except SyntaxError:
        raise UsageError(f"{name!r} is no name of a variable.") from None
    steps: list[tuple[bool, Any]] = []
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute):
            steps.append((True, node.attr))
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            steps.append((False, node.slice.value))
        else:
            raise UsageError(f"{name!r}: a variable, with .attributes and [indices] behind it, can be shown.")
        node = node.value
    if node.id not in space:
        raise UsageError(f"there is no variable {node.id!r}.")
    value = space[node.id]
    for is_attribute, key in reversed(steps):
        try:
            value = getattr(value, key) if is_attribute else value[key]
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            raise UsageError(f"{name!r}: {type(error).__name__}: {error}") from None
    return value
