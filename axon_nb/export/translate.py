"""IPython's own syntax in a cell, as plain Python: translated, or a comment with the reason."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from IPython.core.inputtransformer2 import TransformerManager

__all__ = ["Python", "parse", "translate"]

_NO_COUNTERPART = "has no counterpart in a script"
_REASONS = {
    "alias": _NO_COUNTERPART,
    "autoreload": "a script does not reload modules",
    "conda": "install packages before the run",
    "config": _NO_COUNTERPART,
    "distributed": "concerns the notebook's ranks",
    "gather": "brings a value to the notebook",
    "pull": "brings a value to the notebook",
    "push": "the value comes from the notebook, above",
    "scatter": "the value comes from the notebook, above",
    "debug": "is for a person at the keyboard",
    "load_ext": "a script has no extensions",
    "matplotlib": "a script has no notebook to draw in",
    "mamba": "install packages before the run",
    "pdb": "is for a person at the keyboard",
    "pinfo": "is help for a reader",
    "pinfo2": "is help for a reader",
    "pip": "install packages before the run",
    "reload_ext": "a script has no extensions",
    "run": "import what that file has",
    "timeit": "a measurement, which changes nothing",
    "uv": "install packages before the run",
    "who": "is for a reader",
    "whos": "is for a reader",
}


@dataclass(frozen=True, slots=True)
class Python:
    """A cell as plain Python."""

    code: str
    imports: tuple[str, ...] = ()
    """Imports that the translation needs, a statement each."""


def parse(code: str) -> ast.Module:
    """The tree of a cell's code, in which `await` is allowed.

    Raises:
        SyntaxError: it does not parse.
    """
    tree = compile(code, "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)
    assert isinstance(tree, ast.Module)
    return tree


def translate(code: str) -> Python:
    """Translate one cell.

    Raises:
        SyntaxError: it does not parse even as a cell.
    """
    python = TransformerManager().transform_cell(code)
    if "get_ipython()" not in python:
        return Python(code)
    lines, imports = python.splitlines(), list[str]()
    top = {id(statement) for statement in parse(python).body}
    for statement, call in list(_ipython_calls(parse(python))):
        line = statement.lineno - 1
        indent = lines[line][: statement.col_offset]
        text, needed = _render(statement, call)
        imports += needed
        if text.lstrip().startswith("#") and not (id(statement) in top or statement.col_offset == 0):
            text = f"pass  {text}"
        lines[line] = indent + text
        for follower in range(line + 1, statement.end_lineno or line + 1):
            lines[follower] = ""
    return Python("\n".join(lines) + "\n", tuple(dict.fromkeys(imports)))


def _ipython_calls(tree: ast.AST) -> Iterator[tuple[ast.stmt, ast.Call]]:
    """The statements that are, or assign, a call of `get_ipython()`'s methods."""
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
            return f"# {target}!{command}: its variables are IPython's; call subprocess.run", []
        text = f"f{text}"
    if captured:
        call = f"subprocess.run({text}, shell=True, check=False, capture_output=True, text=True).stdout.splitlines()"
    else:
        call = f"subprocess.run({text}, shell=True, check=False)"
    return target + call, ["import subprocess"]


def _line_magic(target: str, name: str, arguments: str) -> tuple[str, list[str]]:
    arguments = arguments.strip()
    if name == "time" and _is_python(arguments):
        return f"{target}{arguments}  # was timed by %time", []
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
