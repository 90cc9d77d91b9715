"""The script's imports: its cells' imports, moved to the top, without duplicates and unused ones."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable

from axon_nb.export.effects import effects

_WIDTH = 100
_SETTINGS = ("os.environ", "sys.path")
"""What imports may depend on: an import after a change of these stays where it is."""


class Imports:
    """Collects the imports of cells, which must be added in order."""

    def __init__(self) -> None:
        self._modules: dict[tuple[str, str | None], None] = {}
        self._names: dict[str, dict[tuple[str, str | None], None]] = {}
        self._bound: dict[str, tuple[str, ...]] = {}
        self._bound_by_code: set[str] = set()
        self._settings_changed = False
        self.has_star = False
        """Whether there is a star import."""

    def add(self, statement: str) -> None:
        """Add an import statement that the script needs."""
        (node,) = ast.parse(statement).body
        self._record(node)

    def hoist(self, code: str, tree: ast.Module) -> str:
        """Return a cell's code without those top-level imports that can move to the top of the script."""
        lines = code.splitlines()
        for statement in tree.body:
            first, last = statement.lineno - 1, statement.end_lineno or statement.lineno
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                if self._can_move(statement):
                    self._record(statement)
                    lines[first:last] = [""] * (last - first)
                else:
                    lines[last - 1] += "  # noqa: E402"
                    self.has_star = self.has_star or any(alias.name == "*" for alias in statement.names)
            else:
                self._bound_by_code |= effects([statement]).binds
                text = ast.unparse(statement)
                self._settings_changed = self._settings_changed or any(word in text for word in _SETTINGS)
        return "\n".join(lines) + "\n"

    def _can_move(self, statement: ast.Import | ast.ImportFrom) -> bool:
        if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
            return True
        return not self._settings_changed and all(
            name not in self._bound_by_code and self._bound.get(name, key) == key for name, key in _bindings(statement)
        )

    def _record(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                self._modules[alias.name, alias.asname] = None
        elif isinstance(statement, ast.ImportFrom):
            names = self._names.setdefault("." * statement.level + (statement.module or ""), {})
            for alias in statement.names:
                names[alias.name, alias.asname] = None
                self.has_star = self.has_star or alias.name == "*"
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            self._bound.update(_bindings(statement))

    def render(self, used: Iterable[str]) -> str:
        """Return the import lines, standard library first, without imports that bind no name in `used`."""
        wanted = set(used)
        lines: dict[bool, list[tuple[str, str]]] = {True: [], False: []}
        for module, asname in sorted(self._modules, key=str):
            if self.has_star or (asname or module.partition(".")[0]) in wanted:
                text = f"import {module}" + (f" as {asname}" if asname and asname != module else "")
                lines[_is_standard(module)].append(("0" + module, text))
        for module, names in sorted(self._names.items()):
            if module == "__future__":
                continue
            kept = [
                name + (f" as {asname}" if asname and asname != name else "")
                for name, asname in sorted(names, key=str)
                if name == "*" or self.has_star or (asname or name) in wanted
            ]
            if kept:
                lines[_is_standard(module)].append(("1" + module, _from(module, kept)))
        blocks = ["\n".join(text for _, text in sorted(lines[standard])) for standard in (True, False)]
        return "\n\n".join(block for block in blocks if block) + "\n"

    @property
    def future(self) -> str:
        """The `from __future__` line; may be empty."""
        names = sorted(name for name, _ in self._names.get("__future__", {}))
        return f"from __future__ import {', '.join(names)}\n" if names else ""


def packages_in(tree: ast.AST) -> set[str]:
    """Return the top-level packages that code imports, including within functions."""
    packages = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            packages |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            packages.add(node.module.partition(".")[0])
    return packages


def _bindings(statement: ast.Import | ast.ImportFrom) -> list[tuple[str, tuple[str, ...]]]:
    """Names that an import binds, each with its target."""
    if isinstance(statement, ast.Import):
        tops = [alias.name.partition(".")[0] for alias in statement.names]
        pairs = zip(statement.names, tops, strict=True)
        return [(alias.asname or top, (alias.name if alias.asname else top,)) for alias, top in pairs]
    module = "." * statement.level + (statement.module or "")
    return [(alias.asname or alias.name, (module, alias.name)) for alias in statement.names if alias.name != "*"]


def _is_standard(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names


def _from(module: str, names: list[str]) -> str:
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= _WIDTH:
        return line
    return f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")"
