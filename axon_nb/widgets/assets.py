"""Scripts and styles of the views: modules in `static/`, bundled into the one script and one style that a page gets.

`python -m axon_nb.widgets.assets NAME` prints the script of a view (`strip`) or of a module (`strip/store`).
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from itertools import takewhile
from pathlib import Path

from msgspec import Struct

from axon_nb.widgets.html import palette_css

_STATIC = Path(__file__).parent / "static"
_SHARED_STYLES = ("shared/tokens.css", "shared/components.css")
_IMPORT, _FROM, _EXPORT, _DEFAULT = "import {", "} from ", "export ", "default "
_DECLARATIONS = ("async function ", "function* ", "function ", "class ", "const ", "let ")
_COMMENT = re.compile(r"/\*\*.*?\*/ ?| +// [^\"`]*$", re.MULTILINE)
"""Comments after code on the same line."""
_TEXT = re.compile(r'("(?:[^"\\]|\\.)*"|`[^`]*`)')
_PATTERN = re.compile(r"[(=,] ?/")
_SPACED = re.compile(r" ?([=,;:?{}()\[\]<>&|*!/]) ?")
"""Punctuation that needs no spaces around it; plus and minus may."""


class _Module(Struct, frozen=True):
    path: str
    """Below `static/`."""
    imports: dict[str, list[str]]
    """Names, by the path of the module that they come from."""
    names: dict[str, bool]
    """Names declared at the top level, each with whether it is exported."""
    lines: list[str]
    """The code without imports, comments, empty lines and indentation, which pages do not need."""


def script(name: str) -> str:
    """Return the script of a view as one module without imports: anywidget gives the page one text, not a folder.

    Raises:
        ValueError: Modules cannot be bundled, such as two that declare the same name.
    """
    entry = f"{name}/view.js" if (_STATIC / name).is_dir() else f"{name}.js"
    modules = _in_order(entry)
    owners: dict[str, str] = {}
    for module in modules:
        for declared in module.names:
            if (other := owners.setdefault(declared, module.path)) != module.path:
                raise ValueError(f"{module.path} and {other} both declare {declared}: rename one of them.")
    return "".join("".join(module.lines if module.path == entry else _without_exports(module)) for module in modules)


def style(name: str) -> str:
    """Return the style of a view, after the palette and what all views share."""
    return palette_css() + "".join(map(_read, (*_SHARED_STYLES, f"{name}/view.css")))


def _in_order(entry: str) -> list[_Module]:
    """Return a module and all that it imports, each after its own imports."""
    modules: dict[str, _Module] = {}
    waiting = [entry]
    while waiting:
        if (path := waiting.pop()) not in modules:
            modules[path] = _parse(path)
            waiting += modules[path].imports
    for module in modules.values():
        for source, names in module.imports.items():
            if missing := [name for name in names if not modules[source].names.get(name)]:
                raise ValueError(f"{module.path} imports {', '.join(missing)}, which {source} does not export.")
    order = TopologicalSorter({module.path: list(module.imports) for module in modules.values()})
    return [modules[path] for path in order.static_order()]


def _parse(path: str) -> _Module:
    """Read a module. The formatter indents all but the top level, so that only its lines start with a keyword."""
    module = _Module(path, {}, {}, [])
    lines = _code(_read(path))
    for line in lines:
        if line.startswith("import"):
            source, names = _imported(path, line, lines)
            module.imports.setdefault(source, []).extend(names)
            continue
        if line.count("`") % 2:
            raise ValueError(f"{path}: end a template on the line where it begins, unlike {line.strip()!r}.")
        module.lines.append(_without_spaces(line.lstrip(" ")))
        code = line.removeprefix(_EXPORT)
        keyword = next(filter(code.startswith, _DECLARATIONS), None)
        if keyword is not None:
            name = "".join(takewhile(lambda letter: letter.isalnum() or letter in "_$", code.removeprefix(keyword)))
            if not name:
                raise ValueError(f"{path}: declare one name at a time, unlike {line.strip()!r}.")
            module.names[name] = code != line
        elif code != line and not code.startswith(_DEFAULT):
            raise ValueError(f"{path}: export declarations only, unlike {line.strip()!r}.")
    return module


def _code(text: str) -> Iterator[str]:
    """Yield the lines of a module, without comments that have lines of their own."""
    lines = iter(text.splitlines(keepends=True))
    for line in lines:
        start = line.lstrip()
        if start.startswith("/**") and "*/" not in start:
            while "*/" not in next(lines, "*/"):
                pass
        elif start.strip() and not start.startswith("//") and not (start.startswith("/**") and start.endswith("*/\n")):
            yield line


def _without_spaces(line: str) -> str:
    """Remove comments and the formatter's spaces from a line of code; lines with nested strings keep theirs."""
    line = _COMMENT.sub("", line)
    if line.startswith(_EXPORT + _DEFAULT) or "'" in line or line.count("`") > 2 or _PATTERN.search(line):
        return line
    parts = _TEXT.split(line)
    parts[::2] = [_SPACED.sub(r"\1", part) for part in parts[::2]]
    text = "".join(parts)
    return text.rstrip("\n") if text.endswith(("{\n", "(\n", "[\n", ",\n")) else text


def _imported(path: str, line: str, rest: Iterator[str]) -> tuple[str, list[str]]:
    """Return the module and the names of an import that starts with a line and continues with the next ones."""
    while not line.rstrip().endswith(";"):
        line += next(rest, ";")
    names, separator, source = line.rstrip().removesuffix(";").partition(_FROM)
    imported = [name.strip() for name in names.removeprefix(_IMPORT).split(",") if name.strip()]
    if not separator or not names.startswith(_IMPORT) or not all(map(str.isidentifier, imported)):
        raise ValueError(f"{path}: import names in braces, without `as`, unlike {line.strip()!r}.")
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), source.strip('"'))), imported


def _without_exports(module: _Module) -> list[str]:
    if any(line.startswith(_EXPORT + _DEFAULT) for line in module.lines):
        raise ValueError(f"{module.path} is a view; modules cannot import it.")
    return [line.removeprefix(_EXPORT) for line in module.lines]


def _read(path: str) -> str:
    return (_STATIC / path).read_text(encoding="utf-8")


if __name__ == "__main__":
    print(script(sys.argv[1]), end="")
