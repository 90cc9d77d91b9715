"""Cells' code as code of a script: IPython syntax as plain Python, or a comment with the reason; style; imports.

Also guards a cell's own calls of `init_process_group` and `destroy_process_group`. On the notebook's ranks the former
attaches to the existing group, and the latter keeps it for later cells. The script creates the group before the first
cell and destroys it after the last, so these calls must not do so again.

Formatting does not change the code's meaning. Imports move to the top, without duplicates and unused ones.
"""

from __future__ import annotations

import ast
import importlib.util
import io
import json
import shlex
import shutil
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

from IPython.core.inputtransformer2 import TransformerManager
from msgspec import Struct

from axon_nb.export.effects import effects

_NO_COUNTERPART = "has no counterpart in a script"
_REASONS = {
    "alias": _NO_COUNTERPART,
    "autoreload": "a script does not reload modules",
    "conda": "install packages before the run",
    "config": _NO_COUNTERPART,
    "distributed": "controls the notebook's ranks",
    "gather": "fetches a value to the notebook",
    "pull": "fetches a value to the notebook",
    "push": "the value comes from the notebook, above",
    "scatter": "the value comes from the notebook, above",
    "debug": "interactive only",
    "load_ext": "a script has no extensions",
    "matplotlib": "a script has no notebook to plot in",
    "mamba": "install packages before the run",
    "pdb": "interactive only",
    "pinfo": "interactive help",
    "pinfo2": "interactive help",
    "pip": "install packages before the run",
    "reload_ext": "a script has no extensions",
    "run": "import that file instead",
    "timeit": "a measurement without effect",
    "uv": "install packages before the run",
    "who": "interactive only",
    "whos": "interactive only",
}
_INIT, _DESTROY = "init_process_group", "destroy_process_group"
_FIXED = "I001,F401,RUF100"
_NEVER_SILENCED = {"F821", "invalid-syntax"}
"""Undefined names stay visible to the reader."""
_IMPORT_WIDTH = 100
_SETTINGS = ("os.environ", "sys.path")
"""What imports may depend on: an import after a change of these stays where it is."""


class TranslatedCell(Struct, frozen=True):
    """A cell as plain Python."""

    code: str
    imports: tuple[str, ...] = ()
    """Import statements that the translation needs."""


def parse(code: str) -> ast.Module:
    """Parse a cell's code, which may have top-level `await`.

    Raises:
        SyntaxError: it does not parse.
    """
    tree = compile(code, "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)
    assert isinstance(tree, ast.Module)
    return tree


def translate(code: str) -> TranslatedCell:
    """Translate one cell to plain Python.

    Raises:
        SyntaxError: it is not valid even as an IPython cell.
    """
    python = TransformerManager().transform_cell(code)
    if "get_ipython()" not in python:
        return TranslatedCell(code)
    lines, imports = python.splitlines(), list[str]()
    tree = parse(python)
    top = {id(statement) for statement in tree.body}
    for statement, call in list(_ipython_calls(tree)):
        line = statement.lineno - 1
        indent = lines[line][: statement.col_offset]
        text, needed = _render(statement, call)
        imports += needed
        if text.lstrip().startswith("#") and not (id(statement) in top or statement.col_offset == 0):
            text = f"pass  {text}"
        lines[line] = indent + text
        for follower in range(line + 1, statement.end_lineno or line + 1):
            lines[follower] = ""
    return TranslatedCell("\n".join(lines) + "\n", tuple(dict.fromkeys(imports)))


def _ipython_calls(tree: ast.AST) -> Iterator[tuple[ast.stmt, ast.Call]]:
    """Statements that call, or assign the result of, a method of `get_ipython()`."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Expr, ast.Assign)) or not isinstance(node.value, ast.Call):
            continue
        function = node.value.func
        if (
            isinstance(function, ast.Attribute)
            and isinstance(function.value, ast.Call)
            and isinstance(function.value.func, ast.Name)
            and function.value.func.id == "get_ipython"
        ):
            yield node, node.value


def _render(statement: ast.stmt, call: ast.Call) -> tuple[str, list[str]]:
    target = f"{ast.unparse(statement.targets[0])} = " if isinstance(statement, ast.Assign) else ""
    words = [str(getattr(argument, "value", "")) for argument in call.args]
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if method in ("system", "getoutput"):
        return _shell_command(target, words[0], captured=method == "getoutput")
    if method == "run_line_magic" and len(words) == 2:
        return _line_magic(target, *words)
    name = words[0] if words else method
    return f"# {target}%%{name}: {_REASONS.get(name, _NO_COUNTERPART)}", []


def _shell_command(target: str, command: str, *, captured: bool) -> tuple[str, list[str]]:
    text = repr(command)
    if "{" in command or "$" in command:
        if "$" in command or "{{" in command:
            return f"# {target}!{command}: uses IPython variables; call subprocess.run instead", []
        text = f"f{text}"
    if captured:
        call = f"subprocess.run({text}, shell=True, check=False, capture_output=True, text=True).stdout.splitlines()"
    else:
        call = f"subprocess.run({text}, shell=True, check=False)"
    return target + call, ["import subprocess"]


def _line_magic(target: str, name: str, arguments: str) -> tuple[str, list[str]]:
    arguments = arguments.strip()
    if name == "time" and _is_python(arguments):
        return f"{target}{arguments}  # timed by %time in the notebook", []
    if name == "cd" and arguments and not target:
        return f"os.chdir({_unquoted(arguments)!r})", ["import os"]
    if name in ("env", "set_env") and not target and ("=" in arguments or len(arguments.split()) == 2):
        variable, _, value = arguments.partition("=") if "=" in arguments else arguments.partition(" ")
        return f"os.environ[{variable.strip()!r}] = {value.strip()!r}", ["import os"]
    return f"# {target}%{name} {arguments}".rstrip() + f": {_REASONS.get(name, _NO_COUNTERPART)}", []


def _is_python(text: str) -> bool:
    try:
        return len(parse(text).body) == 1
    except SyntaxError:
        return False


def _unquoted(text: str) -> str:
    words = shlex.split(text)
    return words[0] if len(words) == 1 else text


def guard_group_calls(code: str) -> str:
    """Guard these calls, wherever they are statements, for a process that already has a group.

    Every statement of the code stays one statement.

    Args:
        code: A cell with one statement per line.
    """
    if _INIT not in code and _DESTROY not in code:
        return code
    lines = code.splitlines()
    for statement, name, module in sorted(_calls(parse(code)), key=lambda call: -call[0].lineno):
        first, last = statement.lineno - 1, statement.end_lineno or statement.lineno
        indent = lines[first][: statement.col_offset]
        if name == _DESTROY:
            lines[first:last] = [f"{indent}pass  # {ast.unparse(statement)}: this script destroys the group below"]
        else:
            block = indent_code("\n".join(lines[first:last])).splitlines()
            head = f"{indent}if not {module}.is_initialized():  # this script created the group above"
            lines[first:last] = [head, *block]
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


def indent_code(code: str, by: str = "    ") -> str:
    """Indent code by one level, except lines within strings."""
    within = lines_in_strings(code)
    lines = code.splitlines(keepends=True)
    return "".join(
        line if number in within or not line.strip() else by + line for number, line in enumerate(lines, start=1)
    )


def lines_in_strings(code: str) -> set[int]:
    """Return the numbers of lines that begin within a string, from 1."""
    numbers, opened = set[int](), list[int]()
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "STRING":
            numbers |= set(range(token.start[0] + 1, token.end[0] + 1))
        elif kind in ("FSTRING_START", "TSTRING_START"):  # Python 3.12 and newer
            opened.append(token.start[0])
        elif kind in ("FSTRING_END", "TSTRING_END"):
            numbers |= set(range(opened.pop() + 1, token.end[0] + 1))
    return numbers


def comment_out(code: str) -> str:
    """Turn code into comments."""
    return "".join(f"# {line}".rstrip() + "\n" for line in code.strip("\n").splitlines())


def one_statement_per_line(code: str, tree: ast.Module) -> str:
    """Put each top-level statement on its own lines, and expand blocks written on one line."""
    lines, pieces, done = code.splitlines(), list[str](), 0
    groups: list[list[ast.stmt]] = []
    for statement in tree.body:
        if groups and statement.lineno <= (groups[-1][-1].end_lineno or 0):
            groups[-1].append(statement)
        else:
            groups.append([statement])
    for group in groups:
        start, end = _first_line(group[0]), group[-1].end_lineno or group[-1].lineno
        pieces += lines[done : start - 1]
        crowded = len(group) > 1 or _has_semicolon(group[0], lines) or any(map(_has_compact_block, ast.walk(group[0])))
        pieces += [ast.unparse(statement) for statement in group] if crowded else lines[start - 1 : end]
        done = end
    pieces += lines[done:]
    return "\n".join(pieces).rstrip() + "\n"


def _first_line(statement: ast.stmt) -> int:
    decorators = getattr(statement, "decorator_list", [])
    return min(statement.lineno, *(int(decorator.lineno) for decorator in decorators), statement.lineno)


def _has_semicolon(statement: ast.stmt, lines: list[str]) -> bool:
    text = "\n".join(lines[statement.lineno - 1 : statement.end_lineno])
    try:
        return any(token.string == ";" for token in tokenize.generate_tokens(io.StringIO(text).readline))
    except (tokenize.TokenError, IndentationError):
        return False


def _has_compact_block(node: ast.AST) -> bool:
    """Whether a block is on the line of its header, or has two statements on one line."""
    for block in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
        if not isinstance(block, list) or not block or not isinstance(block[0], ast.stmt):
            continue
        lines = [statement.lineno for statement in block]
        if len(set(lines)) < len(lines) or (isinstance(node, ast.stmt) and lines[0] == _header_end(node)):
            return True
    return False


def _header_end(node: ast.stmt) -> int:
    """Last line of a compound statement's header."""
    parts = [part for name in ("test", "iter", "items", "args", "returns", "bases") for part in _listed(node, name)]
    return max([node.lineno, *(getattr(part, "end_lineno", None) or 0 for part in parts)])


def _listed(node: ast.AST, name: str) -> list[ast.AST]:
    value = getattr(node, name, None)
    return [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, ast.AST)]


def apply_ruff(text: str, target: Path) -> tuple[str, list[str]]:
    """Fix imports and add a `noqa` directive for the rules that the cells break, as configured for the script's folder.

    Args:
        text: The script.
        target: Its future path.

    Returns:
        The text and its undefined names; without ruff the unchanged text and no names.
    """
    ruff = _ruff()
    if ruff is None:
        return text, []
    fixed = _run_ruff([*ruff, "check", "--fix-only", f"--fixable={_FIXED}"], text, target) or text
    findings = json.loads(_run_ruff([*ruff, "check", "--output-format=json"], fixed, target) or "[]")
    codes = {entry["code"] for entry in findings if entry.get("code")}
    undefined = sorted(
        {entry["message"].partition("`")[2].partition("`")[0] for entry in findings if entry["code"] == "F821"}
    )
    silenced = sorted(codes - _NEVER_SILENCED)
    if silenced:
        head, end, rest = fixed.partition('"""\n\n')
        fixed = f"{head}{end}# ruff: noqa: {', '.join(silenced)}\n{rest}"
    return fixed, undefined


def _ruff() -> list[str] | None:
    if importlib.util.find_spec("ruff") is not None:
        return [sys.executable, "-m", "ruff"]
    path = shutil.which("ruff")
    return [path] if path else None


def _run_ruff(command: list[str], text: str, target: Path) -> str:
    path = target.absolute()
    options = ["--no-cache", "--quiet", "--exit-zero", "--stdin-filename", str(path), "-"]
    # Run in the script's folder, which determines the first-party modules.
    folder = path.parent if path.parent.is_dir() else None
    return subprocess.run(
        [*command, *options], input=text, cwd=folder, capture_output=True, text=True, check=False
    ).stdout


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
                lines[_is_standard(module)].append(("1" + module, _from_import(module, kept)))
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


def _from_import(module: str, names: list[str]) -> str:
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= _IMPORT_WIDTH:
        return line
    return f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")"
