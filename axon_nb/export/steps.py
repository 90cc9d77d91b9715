"""The steps of a script, derived from a history: the notebook's, or that of a file, whose executed cells it reads."""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from axon_nb.cluster.branches import read_plan
from axon_nb.cluster.history import failed_line
from axon_nb.errors import UsageError
from axon_nb.export.effects import defining_statements, effects
from axon_nb.export.translation import comment_out, guard_group_calls, one_statement_per_line, parse, translate
from axon_nb.records.history import ExecutedCell, PushedValues, SessionFacts, without_undone
from axon_nb.records.ranks import parse_ranks

History = Sequence[ExecutedCell | PushedValues]
_VALUES_CHANGED = re.compile(r"^%distributed (?:load|sync)\b.*(?<!\?)(?<!--help)$", re.MULTILINE)
_NOTEBOOK_COMMANDS = re.compile(r"%(distributed|gather|inside|memory|pull|push|scatter|shards|timeline|watch)\b")
"""Commands that run in the notebook, even in auto mode: a cell with only such lines did not run on any rank."""
_ON_RANKS = ("distributed", "rank")
_INTERRUPTED = ("CellInterrupt", "KeyboardInterrupt")
_RESET_COMMANDS = ("start", "restart")
"""Commands that discard everything done on ranks before."""
_AUTO_STARTED = re.compile(r"^Started (\d+) ranks? \((\w+)\)[;.]", re.MULTILINE)
"""Printed by a cell that started ranks automatically."""


class CellStep(Struct):
    """A cell that ran on ranks."""

    cell: ExecutedCell
    ranks: list[int] | None
    """None for all."""
    code: str
    tree: ast.Module
    imports: tuple[str, ...] = ()
    repeat: int = 0
    """Value of `--repeat`; 0 if not repeated."""
    quiet: bool = False
    """Whether its output was hidden (`--quiet`)."""
    omitted: str = ""
    """The part of the cell that is not run, as comments; may be empty."""


class ValueStep(Struct):
    """A variable that the notebook pushed."""

    name: str
    ranks: tuple[int, ...] | None
    scatter_dim: int | None
    source: str
    """``argument``, ``literal``, ``code``, ``file``, or ``path``: a file named on the command line."""
    text: str = ""
    """Source text of the value, or of the statements that produce it."""
    imports: tuple[str, ...] = ()


class SeedStep(Struct):
    """`%distributed seed`."""

    value: int
    per_rank: bool


class CommandStep(Struct):
    """A line of the notebook that gave ranks values which a script cannot have."""

    line: str
    """Such as ``%distributed load before``."""


Step = CellStep | CommandStep | ValueStep | SeedStep


class _Context(Struct):
    facts: SessionFacts
    values: frozenset[str]
    """Names of pushed values that still exist and can be written to a file."""
    plain: list[ast.stmt] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)
    """Source text of the statements of plain cells, by `id`."""
    arguments: set[str] = field(default_factory=set)
    """Names that already have an argument."""
    emitted: set[int] = field(default_factory=set)
    steps: list[Step] = field(default_factory=list)
    wanted: dict[int, list[str]] = field(default_factory=dict)


def script_steps(
    history: History, facts: SessionFacts, values: Iterable[str] = ()
) -> tuple[list[Step], dict[int, list[str]]]:
    """Return the script's steps and, by index of the cell step, the names fetched after it.

    Args:
        history: Cells and pushes, in order.
        facts: Facts about the ranks.
        values: Names of pushed values that can be written to a file.

    Raises:
        UsageError: no cell ran on ranks.
    """
    context = _Context(facts, frozenset(values))
    pushes = [(index, entry) for index, entry in enumerate(history) if isinstance(entry, PushedValues)]
    last_push = {name: index for index, entry in pushes for name in entry.names}
    for index, entry in enumerate(history):
        if isinstance(entry, PushedValues):
            for name in entry.names:
                context.steps.append(_value(context, entry, name, is_last=last_push[name] == index))
        elif entry.magic:
            step = _cell(entry, facts)
            if step is not None:
                context.steps.append(step)
        else:
            _plain_cell(context, entry)
    if not any(isinstance(step, CellStep) for step in context.steps):
        raise UsageError("Nothing to export: no %%distributed cell has run on these ranks.")
    return context.steps, context.wanted


def _cell(cell: ExecutedCell, facts: SessionFacts) -> CellStep | None:
    try:
        options = _options(cell.magic, facts.num_ranks)
        if options.restores or options.compare is not None or (options.branch and not options.keep):
            return None  # the ranks have the state from before
        if options.branch:
            line = _branch_line(options)
            cell = replace(cell, code=f"{line}\n{cell.code}", failed_line=cell.failed_line and cell.failed_line + 1)
        python = translate(cell.code)
        tree = parse(python.code)
    except (argparse.ArgumentError, SyntaxError, UsageError, ValueError):
        return None  # it did not run on any rank
    if options.help or all(map(_NOTEBOOK_COMMANDS.match, filter(str.strip, cell.code.splitlines()))):
        return None
    code = guard_group_calls(one_statement_per_line(python.code, tree))
    step = CellStep(cell, options.ranks, code, parse(code), python.imports, options.repeat, options.quiet)
    if cell.outcome == "failed":
        # IPython drops leading empty lines when it translates.
        blank = len(cell.code) - len(cell.code.lstrip("\n")) if python.code != cell.code else 0
        limit = (cell.failed_line or 0) - blank
        _omit_after(step, sum((statement.end_lineno or 0) < limit for statement in tree.body))
    return step


def _options(magic: str, num_ranks: int) -> argparse.Namespace:
    """Parse a cell's first line; ``ranks`` is None for all, ``repeat`` 0 if not given."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--ranks")
    parser.add_argument("--repeat", type=int, default=0)
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--help", action="store_true")
    parser.add_argument("--try", dest="restores", action="store_true")
    parser.add_argument("--branch")
    parser.add_argument("--compare", nargs="?", const="")
    parser.add_argument("--keep")
    name, _, line = magic.partition(" ")
    words = shlex.split(line)
    options = parser.parse_known_args(words)[0]
    text = words[0] if name == "rank" and words else options.ranks
    ranks = parse_ranks(text, num_ranks) if text else None
    options.ranks = None if ranks == list(range(num_ranks)) else ranks
    return options


def _branch_line(options: argparse.Namespace) -> str:
    """Give the variable of `--branch` the value that was kept; a script does not know which was best."""
    plan = read_plan(options.branch, options.keep)
    value = plan.keep if plan.keep in plan.values else plan.values[0]
    return f"{plan.name} = {value}  # one of {', '.join(plan.values)}"


def _omit_after(step: CellStep, count: int) -> None:
    """Omit everything after the first `count` statements of a failed cell."""
    lines = step.code.splitlines()
    end = step.tree.body[count - 1].end_lineno or 0 if count else 0
    step.omitted = comment_out("\n".join(lines[end:]))
    step.code = "\n".join(lines[:end]) + "\n" if count else ""
    step.tree = parse(step.code)


def _plain_cell(context: _Context, cell: ExecutedCell) -> None:
    """Read a cell that ran in the notebook: it may bind names that are pushed later, or have magics for the ranks."""
    for line in cell.code.splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "%distributed" and rest.startswith("seed"):
            _seed(context, rest)
        elif word in ("%pull", "%gather"):
            names = [name for name in rest.split("--")[0].split() if name.isidentifier()]
            count = sum(isinstance(step, CellStep) for step in context.steps)
            context.wanted.setdefault(count - 1, []).extend(names)
    if cell.outcome != "ok":
        return
    context.steps += map(CommandStep, _VALUES_CHANGED.findall(cell.code))
    try:
        python = translate(cell.code)
        tree = parse(python.code)
    except SyntaxError:
        return
    for statement in tree.body:
        text = ast.get_source_segment(python.code, statement) or ""
        if "get_ipython()" not in text:
            context.plain.append(statement)
            context.texts[id(statement)] = text


def _seed(context: _Context, line: str) -> None:
    words = line.split()[1:]
    numbers = [word for word in words if word.isdigit()]
    if numbers:
        context.steps.append(SeedStep(int(numbers[0]), "--per-rank" in words))


def _value(context: _Context, entry: PushedValues, name: str, *, is_last: bool) -> ValueStep:
    step = ValueStep(name, entry.ranks, entry.scatter_dim, "path")
    text = entry.literals.get(name) or _assigned_literal(context.plain, name)
    if text and entry.scatter_dim is None:
        step.source, step.text = ("literal" if name in context.arguments else "argument"), text
        context.arguments.add(name)
        return step
    if text:
        step.source, step.text = "literal", text
        return step
    if name in context.values and is_last:
        step.source = "file"
        return step
    statements, missing = defining_statements([name], context.plain)
    if statements and not missing - {"__name__", "__file__"}:
        step.source = "code"
        step.text = _joined(context, statements)
        step.imports = tuple(ast.unparse(s) for s in statements if isinstance(s, (ast.Import, ast.ImportFrom)))
    return step


def _assigned_literal(plain: Sequence[ast.stmt], name: str) -> str:
    """Source text of a name's last assigned value, if that is a literal and unchanged since."""
    for statement in reversed(plain):
        statement_effects = effects([statement])
        if name not in statement_effects.binds and name not in statement_effects.changes:
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


def _joined(context: _Context, statements: Sequence[ast.stmt]) -> str:
    lines = []
    for statement in statements:
        if id(statement) not in context.emitted and not isinstance(statement, (ast.Import, ast.ImportFrom)):
            context.emitted.add(id(statement))
            lines.append(context.texts[id(statement)])
    return "\n".join(lines) + "\n" if lines else ""


def pushes_in(code: str) -> list[PushedValues]:
    """Reconstruct pushes from the `%push` and `%scatter` lines of a cell, where they were not recorded."""
    pushes = []
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
        pushes.append(PushedValues(tuple(options.names), ranks, options.dim if word == "%scatter" else None))
    return pushes


def read_notebook(path: Path) -> tuple[SessionFacts, list[ExecutedCell | PushedValues]]:
    """Read facts and cells from an `.ipynb`; a notebook that was never run is read from top to bottom.

    Raises:
        UsageError: it is not a notebook.
    """
    try:
        cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{path} is not a notebook; expected an .ipynb file.") from None
    ran = [cell for cell in cells if cell.get("execution_count")]
    ordered = sorted(ran, key=lambda cell: int(cell["execution_count"])) if ran else cells
    facts, entries = SessionFacts(), list[ExecutedCell | PushedValues]()
    auto: str | None = None
    for cell in ordered:
        source = "".join(cell["source"])
        for line in source.splitlines():
            words = _words(line)
            if words[:1] == ["%distributed"] and words[1:2] and words[1] in _RESET_COMMANDS:
                facts = _facts(words[2:], facts) if words[1] == "start" else facts
                entries = [entry for entry in entries if isinstance(entry, ExecutedCell) and not entry.magic]
            elif words[:2] == ["%distributed", "config"]:
                facts = _configured(words[2:], facts)
            elif words[:2] == ["%distributed", "auto"]:
                auto = " ".join(words[3:]) if words[2:3] == ["on"] else None
        facts = _facts_from_outputs(cell, facts)
        entry = _entry(cell, source, auto=auto)
        pushes = pushes_in(entry.code) if entry.outcome == "ok" else []
        entries += [*pushes, entry] if entry.magic else [entry, *pushes]
        for output in cell.get("outputs", ()):
            entries = without_undone(entries, "".join(output.get("text", "")), facts.num_ranks)
    return facts, entries


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:
        return line.split()


def _facts(words: list[str], before: SessionFacts) -> SessionFacts:
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("-n", type=int, default=before.num_ranks)
    parser.add_argument("--backend", default="gloo")
    options = parser.parse_known_args(words)[0]
    backend = options.backend if options.backend != "auto" else "gloo"
    return SessionFacts(options.n, backend, before.threads, backend == "nccl")


def _facts_from_outputs(cell: dict[str, Any], before: SessionFacts) -> SessionFacts:
    """Update the facts about the ranks from a cell's outputs."""
    for output in cell.get("outputs", ()):
        with contextlib.suppress(KeyError, TypeError, ValueError):
            before = msgspec.convert(output["metadata"]["axon_nb"], SessionFacts, strict=False)
        if match := _AUTO_STARTED.search("".join(output.get("text", ""))):
            before = SessionFacts(int(match[1]), match[2], before.threads, match[2] == "nccl")
    return before


def _configured(words: list[str], before: SessionFacts) -> SessionFacts:
    for word in words:
        key, _, value = word.partition("=")
        if key == "threads" and value.isdigit():
            return SessionFacts(before.num_ranks, before.backend, int(value), before.on_gpus)
    return before


def _entry(cell: dict[str, Any], source: str, *, auto: str | None) -> ExecutedCell:
    number = cell.get("execution_count")
    first, _, rest = source.lstrip("\n").partition("\n")
    name = first[2:].partition(" ")[0].strip() if first.startswith("%%") else ""
    on_ranks = name in _ON_RANKS
    lines = [line for line in source.splitlines() if line.strip()]
    if not on_ranks and auto is not None and not name and any(not line.lstrip().startswith("%") for line in lines):
        on_ranks, first, rest = True, f"%%distributed {auto}", source
    outcome, line, error = _outcome(cell, number)
    if line is not None and not name:
        line += 1  # the cell was sent without a magic's first line
    magic = first[2:].strip() if on_ranks else ""
    code = rest if on_ranks or name == "local" else source
    return ExecutedCell(number, magic, code, outcome, line, error)


def _outcome(cell: dict[str, Any], number: int | None) -> tuple[str, int | None, str]:
    for output in cell.get("outputs", ()):
        if output.get("output_type") == "error":
            text = (str(output.get("evalue", "")).splitlines() or [""])[0] or str(output.get("ename", ""))
            if output.get("ename") in _INTERRUPTED:
                return "interrupted", None, text
            return "failed", failed_line("\n".join(output.get("traceback", ())), number), text
    return "ok", None, ""
