"""Translates IPython syntax in a cell to plain Python, or to a comment with the reason.

Also guards a cell's own calls of `init_process_group` and `destroy_process_group`. On the notebook's ranks the former
attaches to the existing group, and the latter keeps it for later cells. The script creates the group before the first
cell and destroys it after the last, so these calls must not do so again.
"""

from __future__ import annotations

import ast
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from IPython.core.inputtransformer2 import TransformerManager

from axon_nb.export.style import indent_code

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


@dataclass(frozen=True, slots=True)
class TranslatedCell:
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
