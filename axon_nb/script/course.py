"""The course of a script: its statements in the order in which they run, without what ranks have already."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from axon_nb.script.blocks import Block, body_blocks, split_blocks
from axon_nb.script.command_line import CommandLine, UnreadableError
from axon_nb.script.opening import find_call, is_training, open_function, why_closed

_GROUP_CALLS = ("init_process_group", "destroy_process_group")
_ADDRESS = re.compile(r"""os\.environ\[['"]MASTER_(ADDR|PORT)['"]\]""")
_STARTS_PROCESSES = re.compile(r"\b(mp|multiprocessing)\.(spawn|start_processes|Process)\b|\bnotebook_launcher\(")
_READS_COMMAND_LINE = re.compile(
    r"\b(parse_args|parse_known_args|sys\.argv|HfArgumentParser|absl|click|docopt|fire|hydra|jsonargparse|typer|tyro)\b"
)
_HARMLESS = ("is_initialized", "is_available", "get_world_size", "is_nccl_available", "is_gloo_available")


@dataclass
class Course:
    """The statements that cells are made of."""

    blocks: list[Block]
    settings: set[int] = field(default_factory=set)
    """`id` of the blocks with values of the command line."""
    notes: list[str] = field(default_factory=list)
    """What the user should know, one sentence each."""


def read_course(code: str, name: str, words: Sequence[str]) -> Course:
    """Read a script.

    Args:
        code: Its text.
        name: Its file's name.
        words: The arguments that it would get.

    Raises:
        SyntaxError: it does not parse.
        UsageError: its parser does not accept the arguments.
    """
    blocks = split_blocks(code)
    if starts := _STARTS_PROCESSES.search(code):
        note = (
            f"The script is one cell, because {starts.group().rstrip('(')} starts processes: the ranks are there "
            "already, so call its function instead."
        )
        return _whole(code, name, words, note)
    course = Course(_dissolved(blocks))
    _open_functions(course)
    course.blocks = [block for block in course.blocks if not _belongs_to_group(block.node)]
    _drop_unused(
        course, [function for function in _functions(course.blocks).values() if "process_group" in function.text]
    )
    _read_command_line(course, code, name, words)
    return course


def _whole(code: str, name: str, words: Sequence[str], note: str) -> Course:
    """Return a course of one piece."""
    course = Course([Block(code.strip(), ast.Pass())], notes=[note])
    if words or _READS_COMMAND_LINE.search(code):
        _set_argv(course, name, words)
    return course


def _is_guard(node: ast.stmt) -> bool:
    if not isinstance(node, ast.If) or node.orelse or not isinstance(node.test, ast.Compare):
        return False
    sides = {ast.unparse(node.test.left), *map(ast.unparse, node.test.comparators)}
    return sides == {"__name__", "'__main__'"} and isinstance(node.test.ops[0], ast.Eq)


def _dissolved(blocks: Sequence[Block]) -> list[Block]:
    """Replace ``if __name__ == "__main__"``, and `try` that only destroys the group, by what is in it."""
    found = list[Block]()
    for block in blocks:
        node = block.node
        if _is_guard(node) or _only_destroys(node):
            found += _dissolved(body_blocks(block))
        else:
            found.append(block)
    return found


def _only_destroys(node: ast.stmt) -> bool:
    if not isinstance(node, ast.Try) or node.handlers or node.orelse:
        return False
    return all(map(_belongs_to_group, node.finalbody))


def _functions(blocks: Sequence[Block]) -> dict[str, Block]:
    return {block.node.name: block for block in blocks if isinstance(block.node, ast.FunctionDef)}


def _open_functions(course: Course) -> None:
    """Open the functions that the course calls, as far as that is safe."""
    index = 0
    while index < len(course.blocks):
        functions = _functions(course.blocks[:index])
        call = find_call(course.blocks[index].node)
        function = functions.get(call.name) if call is not None else None
        if call is None or function is None or not is_training(function, set(functions)):
            index += 1
            continue
        before = [block for block in course.blocks[:index] if block is not function]
        after = course.blocks[index + 1 :]
        reason = why_closed(function, call, before, after)
        if reason:
            if call.name == "main" or "train" in function.text or ".backward(" in function.text:
                course.notes.append(f"{call.name}() stays a function, because {reason}.")
            index += 1
            continue
        course.blocks = [*before, *_dissolved(open_function(function, call)), *after]
        index = len(before)


def _belongs_to_group(node: ast.stmt) -> bool:
    """Whether a statement only creates or ends the default group, which ranks have."""
    if isinstance(node, ast.If) and not node.orelse:
        calls = [inner.func for inner in ast.walk(node.test) if isinstance(inner, ast.Call)]
        return all(map(_belongs_to_group, node.body)) and all(_last_name(call) in _HARMLESS for call in calls)
    if isinstance(node, ast.Assign):
        return _ADDRESS.fullmatch(ast.unparse(node.targets[0]).replace('"', "'")) is not None
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return False
    call = node.value
    if _last_name(call.func) == "setdefault" and "MASTER_" in ast.unparse(call):
        return True
    is_default = _last_name(call.func) == _GROUP_CALLS[0] or not (call.args or call.keywords)
    return _last_name(call.func) in _GROUP_CALLS and is_default


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _drop_unused(course: Course, functions: Sequence[Block]) -> None:
    """Drop functions that nothing refers to any more."""
    for function in functions:
        others = [block for block in course.blocks if block is not function]
        names = {inner.id for block in others for inner in ast.walk(block.node) if isinstance(inner, ast.Name)}
        if getattr(function.node, "name", "") not in names:
            course.blocks = others


def _read_command_line(course: Course, code: str, name: str, words: Sequence[str]) -> None:
    """Replace argparse by values; where that fails, give the script its `sys.argv`."""
    if not words and not _READS_COMMAND_LINE.search(code):
        return
    try:
        if _with_values(course, CommandLine(name, words)):
            return
    except UnreadableError:
        pass
    _set_argv(course, name, words)
    course.notes.append("The script reads its command line itself: change its arguments in sys.argv.")


def _set_argv(course: Course, name: str, words: Sequence[str]) -> None:
    argv = Block.parse(f"sys.argv = {[name, *words]!r}  # the command line")
    course.settings.add(id(argv))
    place = sum(isinstance(block.node, ast.ImportFrom) and block.node.module == "__future__" for block in course.blocks)
    course.blocks[place:place] = [Block.parse("import sys"), argv]


def _with_values(course: Course, line: CommandLine) -> bool:
    """Whether the command line was read, and its values have taken the parser's place."""
    functions = _functions(course.blocks)
    kept, read = list[Block](), list[Block]()
    values: Block | None = None
    for block in course.blocks:
        value, target = getattr(block.node, "value", None), _target(block.node)
        called = _parser_function(value, functions)
        if called is not None and target and values is None and _builds_parser(functions[called]):
            function = functions[called]
            assert isinstance(function.node, ast.FunctionDef)
            result = line.read_function(function.node)
            read.append(function)
            if line.is_parser(result) and isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
                line.adopt(target)
                continue
            if not line.parses(result) and not line.is_parser(result):
                raise UnreadableError
            values = Block.parse(line.values(target))
            kept.append(values)
        elif target and line.parses(value):
            values = Block.parse(line.values(target))
            kept.append(values)
        elif not line.read(block.node):
            kept.append(block)
    if values is None:
        return False
    course.blocks = kept
    course.settings.add(id(values))
    _drop_unused(course, read)
    place = kept.index(values)
    if not any(ast.unparse(block.node) == "import argparse" for block in course.blocks[:place]):
        course.blocks.insert(course.blocks.index(values), Block.parse("import argparse"))
    if line.missing:
        course.notes.append(f"Set {', '.join(line.missing)} in its cell: the script requires a value.")
    return True


def _target(node: ast.stmt) -> str:
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return ""


def _parser_function(value: ast.expr | None, functions: dict[str, Block]) -> str | None:
    """Name of the function in ``f()`` and ``f().parse_args()``."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "parse_args":
        value = None if value.args or value.keywords else value.func.value
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and not value.args and not value.keywords:
        return value.func.id if value.func.id in functions else None
    return None


def _builds_parser(function: Block) -> bool:
    return "ArgumentParser(" in function.text
