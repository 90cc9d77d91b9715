"""Reads what a script's argparse would give, so that a cell can have the values instead of the parser."""

from __future__ import annotations

import argparse
import ast
import contextlib
from collections.abc import Sequence
from typing import Any, NoReturn

from axon_nb.errors import UsageError

_TYPES = {"int": int, "float": float, "str": str, "bool": bool}
_ACTIONS = {"store", "store_true", "store_false", "store_const", "append", "append_const", "count", "extend"}
_GROUPS = ("add_argument_group", "add_mutually_exclusive_group")
_CHANGE_VALUES = ("argument_default", "fromfile_prefix_chars", "parents", "prefix_chars")
"""Settings of a parser that its values depend on."""
_PARSES = ("parse_args", "parse_known_args")


class UnreadableError(Exception):
    """What a parser gives depends on more than literals."""


class _Source:
    """A value that only the script can compute."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}.")


class CommandLine:
    """A script's argparse parser, rebuilt from the statements that build it.

    Args:
        name: Name of the script, for errors.
        words: Its arguments.
    """

    def __init__(self, name: str, words: Sequence[str]) -> None:
        self._parser = _Parser(prog=name, add_help=False)
        self._words = list(words)
        self._owners: dict[str, Any] = {}
        """The parser and its groups by variable."""
        self._help: dict[str, str] = {}
        self._required: set[str] = set()
        self.missing: list[str] = []
        """Required arguments without a value."""

    def read(self, statement: ast.stmt) -> bool:
        """Read a statement; return whether it is about the parser, and nothing else.

        Raises:
            UnreadableError: it does with the parser what only running it would show.
        """
        value = getattr(statement, "value", None)
        target = _single_target(statement)
        if isinstance(value, ast.Call):
            name = ast.unparse(value.func)
            if name in ("argparse.ArgumentParser", "ArgumentParser") and target and not self._owners:
                if len(value.args) > 4 or any(one.arg in (None, *_CHANGE_VALUES) for one in value.keywords):
                    raise UnreadableError
                self._owners[target] = self._parser
                return True
            if isinstance(value.func, ast.Attribute) and isinstance(value.func.value, ast.Name):
                owner, method = self._owners.get(value.func.value.id), value.func.attr
                if owner is not None and self._call(owner, method, value, target):
                    return True
        if any(isinstance(node, ast.Name) and node.id in self._owners for node in ast.walk(statement)):
            raise UnreadableError
        return False

    def read_function(self, function: ast.FunctionDef) -> ast.expr | None:
        """Read a function that builds the parser; return what it returns.

        Raises:
            UnreadableError: it does something else, too.
        """
        body = function.body[1:] if ast.get_docstring(function) is not None else function.body
        *statements, last = body
        if not isinstance(last, ast.Return):
            raise UnreadableError
        results = dict[str, ast.expr]()
        for statement in statements:
            if (target := _single_target(statement)) and self.parses(getattr(statement, "value", None)):
                results[target] = statement.value  # type: ignore[attr-defined]
            elif not isinstance(statement, (ast.Import, ast.ImportFrom)) and not self.read(statement):
                raise UnreadableError
        if isinstance(last.value, ast.Name) and last.value.id in results:
            return results[last.value.id]
        return last.value

    def is_parser(self, node: ast.expr | None) -> bool:
        """Whether an expression is the parser."""
        return isinstance(node, ast.Name) and self._owners.get(node.id) is self._parser

    def parses(self, node: ast.expr | None) -> bool:
        """Whether an expression is ``parser.parse_args()``, and with nothing but the command line."""
        return (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "parse_args"
            and not node.args
            and not node.keywords
            and self.is_parser(node.func.value)
        )

    def adopt(self, name: str) -> None:
        """Note that a variable holds the parser, too."""
        self._owners[name] = self._parser

    def values(self, target: str) -> str:
        """Return the statement that assigns the values, one in each line.

        Raises:
            UsageError: the script's arguments are wrong.
        """
        parsed = vars(self._parser.parse_args(self._words))
        self.missing = sorted(name for name in self._required if parsed[name] is None)
        lines = []
        for name, value in parsed.items():
            remarks = ["required"] * (name in self.missing) + [self._help.get(name, "")]
            remark = "; ".join(filter(None, remarks))
            lines.append(f"    {name}={_literal(value)}," + (f"  # {remark}" if remark else ""))
        if not all(name.isidentifier() for name in parsed):
            raise UnreadableError
        return f"{target} = argparse.Namespace(\n" + "".join(f"{line}\n" for line in lines) + ")"

    def _call(self, owner: Any, method: str, call: ast.Call, target: str) -> bool:
        if method in _GROUPS and target:
            self._owners[target] = owner.add_mutually_exclusive_group() if "mutually" in method else owner
            return True
        if any(keyword.arg is None for keyword in call.keywords):
            raise UnreadableError
        options = {keyword.arg or "": keyword.value for keyword in call.keywords}
        if method == "set_defaults":
            self._parser.set_defaults(**{name: _value(node) for name, node in options.items()})
            return True
        if method != "add_argument":
            return False
        self._add(owner, [ast.literal_eval(node) for node in call.args if _is_literal(node)], options)
        return True

    def _add(self, owner: Any, names: list[str], options: dict[str, ast.expr]) -> None:
        given: dict[str, Any] = {}
        if not names:
            raise UnreadableError
        kind = options.pop("type", None)
        action = options.pop("action", None)
        if action is not None:
            given["action"] = _action(action)
        if kind is not None:
            given["type"] = _converter(kind)
        for name in ("nargs", "dest", "const", "default", "choices"):
            if name in options:
                given[name] = _value(options[name])
        if any(isinstance(given.get(name), _Source) for name in ("nargs", "dest")):
            raise UnreadableError
        # argparse converts only texts: `type=str` leaves a default of None as it is.
        if isinstance(given.get("default"), _Source) and kind is not None and ast.unparse(kind) != "str":
            given["default"] = _Source(f"{ast.unparse(kind)}({given['default']})")
        if isinstance(given.get("choices"), _Source):
            del given["choices"]
        required = _value(options["required"]) is True if "required" in options else False
        if not names[0].startswith("-") and given.get("nargs") in (None, "+"):
            required = "default" not in given
            given["nargs"] = "*" if given.get("nargs") else "?"
        with contextlib.suppress(KeyError):
            given["help"] = str(_value(options["help"]))
        text = given.pop("help", "")
        try:
            dest = owner.add_argument(*names, **given).dest
        except (TypeError, ValueError, argparse.ArgumentError):
            raise UnreadableError from None
        self._required |= {dest} if required else set()
        default = given.get("default")
        self._help[dest] = " ".join(text.replace("%(default)s", str(default)).split())


def _single_target(statement: ast.stmt) -> str:
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return targets[0].id if len(targets) == 1 and isinstance(targets[0], ast.Name) else ""


def _is_literal(node: ast.expr) -> bool:
    return not isinstance(_value(node), _Source)


def _value(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        if "SUPPRESS" in ast.unparse(node):
            raise UnreadableError from None
        return _Source(ast.unparse(node))


def _action(node: ast.expr) -> Any:
    if ast.unparse(node).endswith("BooleanOptionalAction"):
        return argparse.BooleanOptionalAction
    action = _value(node)
    if action not in _ACTIONS:
        raise UnreadableError
    return action


def _converter(node: ast.expr) -> Any:
    name = ast.unparse(node)
    return _TYPES.get(name, lambda text: _Source(f"({name})({text!r})" if "lambda" in name else f"{name}({text!r})"))


def _literal(value: Any) -> str:
    if isinstance(value, float) and repr(value) in ("inf", "-inf", "nan"):
        return f'float("{value}")'
    return repr(value)
