"""The statements of a script as text: each with the comments above it, so that they survive being moved."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from axon_nb.export.style import lines_in_strings, one_statement_per_line


@dataclass(frozen=True)
class Block:
    """One statement."""

    text: str
    """Its lines, with the comments above."""
    node: ast.stmt
    """The statement; its line numbers are those of `text`."""
    is_apart: bool = False
    """Whether an empty line precedes it."""

    @classmethod
    def parse(cls, text: str) -> Block:
        """Make a block from the text of one statement."""
        (node,) = ast.parse(text.strip("\n")).body
        return cls(text.strip("\n"), node, is_apart=text.startswith("\n"))


def split_blocks(code: str) -> list[Block]:
    """Split code into its top-level statements, in order.

    Raises:
        SyntaxError: it does not parse.
    """
    code = one_statement_per_line(code, ast.parse(code))
    lines, blocks, done = code.splitlines(), list[Block](), 0
    for node in ast.parse(code).body:
        end = node.end_lineno or node.lineno
        blocks.append(Block.parse("\n".join(lines[done:end])))
        done = end
    return blocks


def body_blocks(owner: Block) -> list[Block]:
    """Return the statements of a function, an `if`, or a `try`, moved to the top level, without a docstring."""
    node = owner.node
    assert isinstance(node, (ast.FunctionDef, ast.If, ast.Try))
    body = node.body[1:] if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None else node.body
    if not body:
        return []
    lines, within = owner.text.splitlines(), lines_in_strings(owner.text)
    first = min([body[0].lineno, *(part.lineno for part in getattr(body[0], "decorator_list", []))])
    while first - 1 > node.lineno and _is_remark(lines[first - 2]) and first - 1 not in within:
        first -= 1
    indent = body[0].col_offset
    moved = [
        line if number in within else _dedented(line, indent)
        for number, line in enumerate(lines[first - 1 : body[-1].end_lineno], start=first)
    ]
    text = "\n".join(moved)
    try:
        same = ast.dump(ast.parse(text)) == ast.dump(ast.Module(body, []))
    except SyntaxError:
        same = False
    return split_blocks(text if same else "\n".join(map(ast.unparse, body)))


def _is_remark(line: str) -> bool:
    return not line.strip() or line.lstrip().startswith("#")


def _dedented(line: str, indent: int) -> str:
    return line[indent:] if not line[:indent].strip() else line.lstrip()
