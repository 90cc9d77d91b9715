"""What a script does, one step after the other, as it follows from a notebook's history."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from axon_nb.errors import UsageError
from axon_nb.export.flow import effects
from axon_nb.export.liveness import making_of
from axon_nb.export.own_group import with_group_kept
from axon_nb.export.style import commented, one_a_line
from axon_nb.export.translate import parse, translate
from axon_nb.records.history import ExecutedCell, PushedValues, SessionFacts
from axon_nb.records.ranks import parse_ranks

__all__ = ["CellStep", "History", "SeedStep", "Step", "ValueStep", "pushes_in", "steps_of"]

History = Sequence[ExecutedCell | PushedValues]
_OURS = re.compile(r"%(distributed|gather|memory|pull|push|scatter|shards|timeline|watch)\b")
"""Lines that run in the notebook, in auto mode too: where there are no others, no rank has run the cell."""


@dataclass
class CellStep:
    """A cell that ran on ranks."""

    cell: ExecutedCell
    ranks: list[int] | None
    """None: all."""
    code: str
    tree: ast.Module
    imports: tuple[str, ...] = ()
    repeat: int = 0
    """How often it ran, as `--repeat` had it; 0: once."""
    quiet: bool = False
    """Whether the notebook showed nothing of it."""
    left_out: str = ""
    """Code of the cell that is not run, as comments; empty: all of it is."""


@dataclass
class ValueStep:
    """A variable that came from the notebook."""

    name: str
    ranks: tuple[int, ...] | None
    scatter_dim: int | None
    way: str
    """``argument``, ``literal``, ``code``, ``file``, or ``path``: a file that whoever runs the script names."""
    text: str = ""
    """Source text of the value, or of the statements that make it."""
    imports: tuple[str, ...] = ()


@dataclass
class SeedStep:
    """`%distributed seed`."""

    value: int
    per_rank: bool


Step = CellStep | ValueStep | SeedStep


@dataclass
class _Walk:
    facts: SessionFacts
    values: frozenset[str]
    """Names of those that the notebook still has, to be written to a file."""
    plain: list[ast.stmt] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)
    """Source text of the statements of plain cells, by `id`."""
    given: set[str] = field(default_factory=set)
    """Names that an argument was made for."""
    made: set[int] = field(default_factory=set)
    steps: list[Step] = field(default_factory=list)
    wanted: dict[int, list[str]] = field(default_factory=dict)


def steps_of(
    history: History, facts: SessionFacts, values: Iterable[str] = ()
) -> tuple[list[Step], dict[int, list[str]]]:
    """The steps, and the names that the notebook fetched after the cell step of an index.

    Args:
        history: What was done, in order.
        facts: The ranks.
        values: Names of pushed values that can be written to a file.

    Raises:
        UsageError: no cell ran on ranks.
    """
    walk = _Walk(facts, frozenset(values))
    pushes = [(index, entry) for index, entry in enumerate(history) if isinstance(entry, PushedValues)]
    last_push = {name: index for index, entry in pushes for name in entry.names}
    for index, entry in enumerate(history):
        if isinstance(entry, PushedValues):
            for name in entry.names:
                walk.steps.append(_value(walk, entry, name, is_last=last_push[name] == index))
        elif entry.magic:
            step = _cell(entry, facts)
            if step is not None:
                walk.steps.append(step)
        else:
            _plain_cell(walk, entry)
    if not any(isinstance(step, CellStep) for step in walk.steps):
        raise UsageError("There is nothing to export: no %%distributed cell has run on these ranks.")
    return walk.steps, walk.wanted


def _cell(cell: ExecutedCell, facts: SessionFacts) -> CellStep | None:
    try:
        options = _options(cell.magic, facts.num_ranks)
        python = translate(cell.code)
        tree = parse(python.code)
    except (argparse.ArgumentError, SyntaxError, UsageError, ValueError):
        return None  # no rank has run it
    if options.help or all(map(_OURS.match, filter(str.strip, cell.code.splitlines()))):
        return None
    code = with_group_kept(one_a_line(python.code, tree))
    step = CellStep(cell, options.ranks, code, parse(code), python.imports, options.repeat, options.quiet)
    if cell.outcome == "failed":
        # IPython leaves out the empty lines before the first when it translates.
        blank = len(cell.code) - len(cell.code.lstrip("\n")) if python.code != cell.code else 0
        limit = (cell.failed_line or 0) - blank
        _cut(step, sum((statement.end_lineno or 0) < limit for statement in tree.body))
    return step


def _options(magic: str, num_ranks: int) -> argparse.Namespace:
    """What a cell's first line says: ``ranks`` (None: all), ``repeat`` (0: not) and ``quiet``."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--ranks")
    parser.add_argument("--repeat", type=int, default=0)
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--help", action="store_true")
    name, _, line = magic.partition(" ")
    words = shlex.split(line)
    options = parser.parse_known_args(words)[0]
    text = words[0] if name == "rank" and words else options.ranks
    ranks = parse_ranks(text, num_ranks) if text else None
    options.ranks = None if ranks == list(range(num_ranks)) else ranks
    return options


def _cut(step: CellStep, count: int) -> None:
    """Leave out what comes after the first `count` statements of a failed cell."""
    lines = step.code.splitlines()
    end = step.tree.body[count - 1].end_lineno or 0 if count else 0
    step.left_out = commented("\n".join(lines[end:]))
    step.code = "\n".join(lines[:end]) + "\n" if count else ""
    step.tree = parse(step.code)


def _plain_cell(walk: _Walk, cell: ExecutedCell) -> None:
    """Take in a cell of the notebook's own: what it binds may be pushed later, and its magics may concern the ranks."""
    for line in cell.code.splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "%distributed" and rest.startswith("seed"):
            _seed(walk, rest)
        elif word in ("%pull", "%gather"):
            names = [name for name in rest.split("--")[0].split() if name.isidentifier()]
            count = sum(isinstance(step, CellStep) for step in walk.steps)
            walk.wanted.setdefault(count - 1, []).extend(names)
    if cell.outcome != "ok":
        return
    try:
        python = translate(cell.code)
        tree = parse(python.code)
    except SyntaxError:
        return
    for statement in tree.body:
        text = ast.get_source_segment(python.code, statement) or ""
        if "get_ipython()" not in text:
            walk.plain.append(statement)
            walk.texts[id(statement)] = text


def _seed(walk: _Walk, line: str) -> None:
    words = line.split()[1:]
    numbers = [word for word in words if word.isdigit()]
    if numbers:
        walk.steps.append(SeedStep(int(numbers[0]), "--per-rank" in words))


def _value(walk: _Walk, entry: PushedValues, name: str, *, is_last: bool) -> ValueStep:
    step = ValueStep(name, entry.ranks, entry.scatter_dim, "path")
    text = entry.literals.get(name) or _assigned_literal(walk.plain, name)
    if text and entry.scatter_dim is None:
        step.way, step.text = ("literal" if name in walk.given else "argument"), text
        walk.given.add(name)
        return step
    if text:
        step.way, step.text = "literal", text
        return step
    if name in walk.values and is_last:
        step.way = "file"
        return step
    statements, missing = making_of([name], walk.plain)
    if statements and not missing - _known():
        step.way = "code"
        step.text = _joined(walk, statements)
        step.imports = tuple(ast.unparse(s) for s in statements if isinstance(s, (ast.Import, ast.ImportFrom)))
    return step


def _assigned_literal(plain: Sequence[ast.stmt], name: str) -> str:
    """Source text of the value that a name was last given, if that is a literal and nothing has changed it since."""
    for statement in reversed(plain):
        found = effects([statement])
        if name not in found.binds and name not in found.changes:
            continue
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target, value = statement.targets[0], statement.value
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
                pairs = {getattr(t, "id", ""): v for t, v in zip(target.elts, value.elts, strict=True)}
                value = pairs.get(name, value)
            elif not isinstance(target, ast.Name):
                return ""
            return ast.unparse(value) if _is_literal(value) else ""
        return ""
    return ""


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return False
    return True


def _known() -> set[str]:
    return {"__name__", "__file__"}


def _joined(walk: _Walk, statements: Sequence[ast.stmt]) -> str:
    lines = []
    for statement in statements:
        if id(statement) not in walk.made and not isinstance(statement, (ast.Import, ast.ImportFrom)):
            walk.made.add(id(statement))
            lines.append(walk.texts[id(statement)])
    return "\n".join(lines) + "\n" if lines else ""


def pushes_in(code: str) -> list[PushedValues]:
    """What the `%push` and `%scatter` lines of a cell's code send, where nobody has recorded it."""
    found = []
    for line in code.splitlines():
        word, _, rest = line.strip().partition(" ")
        if word not in ("%push", "%scatter"):
            continue
        parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
        parser.add_argument("names", nargs="*")
        parser.add_argument("--ranks")
        parser.add_argument("--dim", type=int, default=0)
        options = parser.parse_known_args(shlex.split(rest))[0]
        ranks = tuple(parse_ranks(options.ranks, 1 << 16)) if options.ranks else None
        found.append(PushedValues(tuple(options.names), ranks, options.dim if word == "%scatter" else None))
    return found
