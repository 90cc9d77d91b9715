"""The course of a script: its statements in the order in which they run, without what ranks have already.

Comments stay with the statement below them. A function that a script calls once is opened: its statements take the
place of the call, and its locals become globals. It stays a function where that could change what the script does.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from msgspec import Struct, field

from axon_nb.export.effects import effects, free_names
from axon_nb.export.translation import lines_in_strings, one_statement_per_line
from axon_nb.script.command_line import CommandLine, UnreadableError

_DROPPED_DECORATORS = ("record", "errors.record")
"""torchrun's, which writes the error of a worker to a file."""
_READS_SCOPE = ("locals", "vars", "globals", "eval", "exec")
_OWN_SCOPE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_EXITS = ("sys.exit", "exit", "quit", "SystemExit")
_GROUP_CALLS = ("init_process_group", "destroy_process_group")
_ADDRESS = re.compile(r"""os\.environ\[['"]MASTER_(ADDR|PORT)['"]\]""")
_STARTS_PROCESSES = re.compile(r"\b(mp|multiprocessing)\.(spawn|start_processes|Process)\b|\bnotebook_launcher\(")
_READS_COMMAND_LINE = re.compile(
    r"\b(parse_args|parse_known_args|sys\.argv|HfArgumentParser|absl|click|docopt|fire|hydra|jsonargparse|typer|tyro)\b"
)
_HARMLESS = ("is_initialized", "is_available", "get_world_size", "is_nccl_available", "is_gloo_available")


class Block(Struct, frozen=True):
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


class Call(Struct, frozen=True):
    """A statement that is a call of a function of the script."""

    name: str
    node: ast.Call
    target: ast.expr | None
    """What receives its value; None: nothing does."""


def find_call(statement: ast.stmt) -> Call | None:
    """Return the call if a statement is ``f(…)``, ``x = f(…)`` or ``sys.exit(f(…))``."""
    value: ast.expr | None = None
    target: ast.expr | None = None
    if isinstance(statement, ast.Expr):
        value = statement.value
        if isinstance(value, ast.Call) and ast.unparse(value.func) in _EXITS and len(value.args) == 1:
            value = value.args[0]
    elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        value, target = statement.value, statement.targets[0]
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        return Call(value.func.id, value, target)
    return None


def is_training(function: Block, names: set[str]) -> bool:
    """Whether a function is part of the script's course, rather than a helper."""
    node = function.node
    assert isinstance(node, ast.FunctionDef)
    if node.name == "main" or any(f"{word}(" in function.text for word in (".backward", "process_group")):
        return True
    calls = [inner.func for inner in ast.walk(node) if isinstance(inner, ast.Call)]
    return any(isinstance(called, ast.Name) and called.id in names for called in calls)


def why_closed(function: Block, call: Call, before: Sequence[Block], after: Sequence[Block]) -> str:
    """Return why a function is not opened; empty if it can be.

    Args:
        function: The function.
        call: Its call.
        before: The other statements up to the call.
        after: The statements after it.
    """
    node = function.node
    assert isinstance(node, ast.FunctionDef)
    nodes = list(_own_nodes(node))
    returns = [inner for inner in nodes if isinstance(inner, ast.Return)]
    arguments = node.args
    everywhere = [inner for block in (*before, function, *after) for inner in ast.walk(block.node)]
    if any(isinstance(inner, ast.Name) and inner.id == node.name for inner in everywhere):
        return "it is used in more than one place"
    if any(ast.unparse(decorator) not in _DROPPED_DECORATORS for decorator in node.decorator_list):
        return f"@{ast.unparse(node.decorator_list[0])} changes it"
    if any(isinstance(inner, (ast.Yield, ast.YieldFrom, ast.Await)) for inner in nodes):
        return "it is a generator"
    if [inner for inner in returns if inner is not node.body[-1]]:
        return "it returns before its end"
    if any(isinstance(inner, ast.Nonlocal) for inner in ast.walk(node)):
        return "an inner function changes its variables"
    if any(isinstance(inner, ast.Name) and inner.id in _READS_SCOPE for inner in ast.walk(node)):
        return "it looks at its variables as a whole"
    if arguments.vararg or arguments.kwarg or arguments.posonlyargs or _has_stars(call.node):
        return "it takes any number of arguments"
    if (bindings := _bindings(node, call)) is None:
        return "its arguments are not those of its call, or a default is not a literal"
    locals_ = effects(node.body).binds | {name for name, value in bindings if ast.unparse(value) != name}
    locals_ -= _same_imports(node, before)
    shared = sorted(locals_ & _reads(before, after))
    return f"its variable {shared[0]} would change that of the script" if shared else ""


def open_function(function: Block, call: Call) -> list[Block]:
    """Return the statements that take the place of a call; `why_closed` must be empty."""
    node = function.node
    assert isinstance(node, ast.FunctionDef)
    blocks = body_blocks(function)
    if blocks and isinstance(blocks[-1].node, ast.Return):
        blocks[-1:] = _returned(blocks[-1].node.value, call.target)
    elif call.target is not None:
        blocks.append(Block.parse(f"{ast.unparse(call.target)} = None"))
    pairs = [(name, ast.unparse(value)) for name, value in _bindings(node, call) or []]
    pairs = [(name, text) for name, text in pairs if name != text]
    names, texts = {name for name, _ in pairs}, " ".join(text for _, text in pairs)
    if names & {
        inner.id for inner in ast.walk(ast.parse(f"[{', '.join(t for _, t in pairs)}]")) if isinstance(inner, ast.Name)
    }:
        head = [f"{', '.join(name for name, _ in pairs)} = {', '.join(text for _, text in pairs)}"] if texts else []
    else:
        head = [f"{name} = {text}" for name, text in pairs]
    return [*map(Block.parse, head), *blocks]


def _returned(value: ast.expr | None, target: ast.expr | None) -> list[Block]:
    text = "None" if value is None else ast.unparse(value)
    if target is not None:
        return [] if ast.unparse(target) == text else [Block.parse(f"{ast.unparse(target)} = {text}")]
    return [] if value is None or isinstance(value, (ast.Constant, ast.Name, ast.Tuple)) else [Block.parse(text)]


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a function, but not those of inner functions and classes."""
    waiting = list(getattr(function, "body", []))
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, _OWN_SCOPE):
            waiting += ast.iter_child_nodes(node)


def _has_stars(call: ast.Call) -> bool:
    return any(isinstance(item, ast.Starred) for item in call.args) or any(k.arg is None for k in call.keywords)


def _bindings(function: ast.FunctionDef, call: ast.Call | Call) -> list[tuple[str, ast.expr]] | None:
    """Each parameter with its value; None if one has none, or its default is computed."""
    node = call.node if isinstance(call, Call) else call
    parameters = function.args.args
    names = [parameter.arg for parameter in (*parameters, *function.args.kwonlyargs)]
    values: dict[str, ast.expr] = dict(
        zip(
            [parameter.arg for parameter in parameters][len(parameters) - len(function.args.defaults) :],
            function.args.defaults,
            strict=True,
        )
    )
    values |= {p.arg: d for p, d in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True) if d}
    if len(node.args) > len(parameters) or any(not isinstance(d, ast.Constant) for d in values.values()):
        return None
    values |= {parameter.arg: value for parameter, value in zip(parameters, node.args, strict=False)}
    values |= {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg in names}
    if len(values) < len(names) or any(keyword.arg not in names for keyword in node.keywords):
        return None
    return [(name, values[name]) for name in names]


def _same_imports(function: ast.FunctionDef, before: Sequence[Block]) -> set[str]:
    """Names that a function imports as the script has imported them."""
    imported = {
        (ast.unparse(alias), getattr(block.node, "module", ""))
        for block in before
        if isinstance(block.node, (ast.Import, ast.ImportFrom))
        for alias in block.node.names
    }
    return {
        alias.asname or alias.name.partition(".")[0]
        for node in _own_nodes(function)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
        if (ast.unparse(alias), getattr(node, "module", "")) in imported
    }


def _reads(before: Sequence[Block], after: Sequence[Block]) -> set[str]:
    """Names whose values in the script somebody reads after the call: functions, or later statements."""
    free = set[str]()
    for block in (*before, *after):
        for node in ast.walk(block.node):
            if isinstance(node, _OWN_SCOPE):
                free |= free_names(node)
    total = effects([block.node for block in after])
    return free | total.uses | (total.changes - total.replaces)


class Course(Struct):
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
        if called is not None and target and values is None and "ArgumentParser(" in functions[called].text:
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
