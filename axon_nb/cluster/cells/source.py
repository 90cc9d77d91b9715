"""The code of a cell, checked in the notebook before any rank sees it."""

from __future__ import annotations

import ast
import re
import traceback

from IPython.core.inputtransformer2 import TransformerManager

from axon_nb.errors import UsageError

RANK_MAGICS = ("distributed", "rank")
"""The cell magics that send a cell to ranks."""
_DTENSOR = "`torch.distributed.tensor`"
_REPLACEMENTS = {
    "FullyShardedDataParallel": "`torch.distributed.fsdp.fully_shard`",
    "_composable.fsdp": "`torch.distributed.fsdp`",
    "_shard": _DTENSOR,
    "_sharded_tensor": _DTENSOR,
    "_tensor": _DTENSOR,
}
DEPRECATED = re.compile(
    r"\bFullyShardedDataParallel\b"
    r"|\btorch\.distributed(?:\.| import )(_composable\.fsdp|_shard|_sharded_tensor|_tensor)\b"
)
"""Finds names that torch has replaced and says nothing about when they are used."""
_noted: set[str] = set()


class CellSyntaxError(UsageError):
    """The cell has a syntax error; no rank has run it."""

    def __init__(self, error: SyntaxError) -> None:
        super().__init__(f"line {error.lineno}: {error.msg}")
        self._report = "".join(traceback.format_exception_only(error)).splitlines()

    def _render_traceback_(self) -> list[str]:
        return [*self._report, "No rank has run the cell."]


def with_head(body: str, head: str) -> str:
    """Return the cell as ranks compile it: the magic's line becomes a comment, so line numbers match the notebook's.

    A body that starts with another cell magic, such as ``%%time``, stays as it is, because IPython expects that magic
    in the first line.
    """
    if inner := inner_magic(body):
        if inner in RANK_MAGICS:
            outer = head.partition(" ")[0]
            raise UsageError(f"The cell has two lines that choose ranks, {outer} and %%{inner}: keep one.")
        return body.lstrip()
    return f"# {head.rstrip()}\n{body}"


def inner_magic(body: str) -> str:
    """Return the name of the cell magic that a cell's body starts with; empty if there is none."""
    match = re.match(r"\s*%%(\w+)", body)
    return match.group(1) if match else ""


def check(code: str, *, name: str = "cell") -> None:
    """Parse `code` as IPython does: `await`, `!cmd` and `%magic` are allowed.

    Raises:
        CellSyntaxError: it has a syntax error.
    """
    try:
        python = TransformerManager().transform_cell(code)
        compile(python, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)
    except SyntaxError as error:
        error.filename = name
        raise CellSyntaxError(error) from None
    except ValueError as error:  # such as null bytes
        raise CellSyntaxError(SyntaxError(str(error))) from None


def mentions(code: str, name: str) -> bool:
    """Whether the code may read the variable `name`, because it contains the word."""
    return re.search(rf"\b{name}\b", code) is not None


def deprecations(code: str) -> list[str]:
    """Return a line for each name that torch has replaced, with what to use; for each once in this notebook."""
    statements = "\n".join(line.partition("#")[0] for line in code.splitlines())
    found = {match[0].replace(" import ", "."): match[1] or match[0] for match in DEPRECATED.finditer(statements)}
    lines = [
        f"torch has deprecated `{name}`: use {_REPLACEMENTS[key]}." for name, key in found.items() if name not in _noted
    ]
    _noted.update(found)
    return lines


def is_empty(body: str) -> bool:
    """Whether there is nothing to run: only blank lines and comments."""
    return all(not line.strip() or line.lstrip().startswith("#") for line in body.splitlines())
