"""Draw the rooms of the package, from its imports, into `docs/design/rooms.md`.

One picture per package that has rooms: an arrow points from a room to each room or file that it imports, unless another
path of arrows already says so. `--check` writes nothing and fails if the page is out of date.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import grimp

from scripts.generated_page import ROOT, write_or_check

TARGET = ROOT / "docs" / "design" / "rooms.md"
PACKAGES = ("axon_nb", *(f"axon_nb.{name}" for name in ("cluster", "engine", "plan", "widgets", "comm", "parallel")))

HEAD = """\
# The rooms, drawn from the imports

Rooms: all of them. Boxes are folders, round ends are single files. An arrow points from what imports to what is
imported; arrows that a longer path implies are left out. `scripts/rooms.py` writes this page.
"""

SESSION = "axon_nb.engine.session"
"""Names, for the type checker, the classes of what it holds, which are above it."""
Arrows = dict[str, set[str]]
"""By room or file what it imports, by their names inside the package."""


def arrows(graph: grimp.ImportGraph, package: str) -> Arrows:
    """Find which children of `package` import which others, including imports for type checking."""
    found: Arrows = {child.rpartition(".")[2]: set() for child in graph.find_children(package)}
    depth = package.count(".") + 1
    for module in graph.find_descendants(package):
        own = module.split(".")[depth]
        for imported in graph.find_modules_directly_imported_by(module):
            if imported.startswith(f"{package}."):
                found[own].add(imported.split(".")[depth])
        found[own].discard(own)
    return found


def reduced(found: Mapping[str, set[str]]) -> Arrows:
    """Leave out arrows that a longer path implies (transitive reduction of a graph without cycles)."""
    below: Arrows = {}

    def reach(name: str) -> set[str]:
        if name not in below:
            below[name] = set(found[name]).union(*map(reach, found[name]))
        return below[name]

    return {name: {to for to in found[name] if not any(to in reach(by) for by in found[name])} for name in found}


def draw(graph: grimp.ImportGraph, package: str) -> str:
    """Draw the children of a package as a mermaid flowchart: folders as boxes, single files with round ends."""
    found = {name: to for name, to in reduced(arrows(graph, package)).items() if not name.startswith("_")}
    connected = {name for name, to in found.items() if to} | set().union(*found.values())
    lines = ["flowchart TD"]
    for name in sorted(connected):
        is_room = bool(graph.find_children(f"{package}.{name}"))
        lines.append(f"    {name}_[{name}]" if is_room else f"    {name}_([{name}.py])")
    lines += [f"    {name}_ --> {to}_" for name in sorted(found) for to in sorted(found[name])]
    return "\n".join(["```mermaid", *lines, "```"])


def rooms_table(root: Path) -> str:
    """List every room with the first line of its docstring."""
    rows = ["| room | holds |", "|---|---|"]
    folders = (Path(folder) for folder, _, files in os.walk(root, followlinks=True) if "__init__.py" in files)
    for init in sorted(folder / "__init__.py" for folder in folders):  # `magics` is a link, except in an archive
        room = init.parent.relative_to(root).as_posix()
        text = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or ""
        if room != ".":
            rows.append(f"| `{room}` | {text.partition(chr(10))[0]} |")
    return "\n".join(rows)


def render() -> str:
    """Render `docs/design/rooms.md`."""
    graph = grimp.build_graph("axon_nb", cache_dir=None)
    loaded = grimp.build_graph("axon_nb", cache_dir=None, exclude_type_checking_imports=True)
    own = loaded.find_modules_directly_imported_by(SESSION)
    for imported in graph.find_modules_directly_imported_by(SESSION) - own:
        graph.remove_import(importer=SESSION, imported=imported)
    parts = [f"## `{package}`\n\n{draw(graph, package)}" for package in PACKAGES]
    return "\n\n".join([HEAD.rstrip(), *parts, "## All rooms", rooms_table(ROOT / "axon_nb")]) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Write the page; return 1 if `--check` finds it out of date."""
    return write_or_check(TARGET, render, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
