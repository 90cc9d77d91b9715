"""The script: set-up, the steps in order, teardown."""

from __future__ import annotations

import ast
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from axon_nb.errors import UsageError
from axon_nb.export.flow import effects
from axon_nb.export.head import Arguments, set_up
from axon_nb.export.imports import Imports, packages_in
from axon_nb.export.liveness import live_cells
from axon_nb.export.steps import CellStep, History, SeedStep, Step, ValueStep, steps_of
from axon_nb.export.style import indented
from axon_nb.export.translate import parse
from axon_nb.records.history import SessionFacts

__all__ = ["Script", "make_script"]

_RANK_NAMES = ("rank", "local_rank", "world_size", "device", "world", "mesh", "dist", "torch", "subgroup", "axon_nb")
_LOOKS = {"item", "tolist", "sum", "mean", "max", "min", "numel", "size", "keys", "values", "items", "len", "sorted"}
_SHARE = '''
def {name}(values, index, count, dim=0):
    """The part of `values` that belongs to the rank at `index` of `count`."""
    length = values.shape[dim] if hasattr(values, "shape") else len(values)
    size, longer = divmod(length, count)
    part = slice(index * size + min(index, longer), (index + 1) * size + min(index + 1, longer))
    rows = getattr(values, "iloc", values)
    return rows[(slice(None),) * dim + (part,)] if dim else rows[part]
'''
_SHOW = '''
def {name}(value):
    """Print what the notebook showed below a cell."""
    if value is not None:
        print(f"[rank {rank}] {value!r}", flush=True)
'''


@dataclass(frozen=True, slots=True)
class Script:
    """What an export gives."""

    text: str
    file_names: tuple[str, ...]
    """Names of the variables that the script reads from the file beside it."""
    paths: tuple[str, ...]
    """Names of the variables whose files have to be named on its command line."""
    left_out: int
    """Cells that were left out as dead."""


def make_script(
    history: History,
    facts: SessionFacts,
    *,
    title: str,
    file_name: str,
    values: Collection[str] = (),
    live_only: bool = False,
) -> Script:
    """Write the script of a session.

    Args:
        history: What was done, in order.
        facts: The ranks that it was done on.
        title: What was exported, such as the notebook's name.
        file_name: Name of the script's own file.
        values: Names of pushed variables that can be written to a file beside it.
        live_only: Whether cells that the session's end does not depend on are left out.

    Raises:
        UsageError: no cell ran on ranks.
    """
    steps, wanted = steps_of(history, facts, values)
    every = [step for step in steps if isinstance(step, CellStep)]
    dead = _strip_dead(every, wanted) if live_only else []
    empty = {id(step) for step in dead if not step.code}
    kept = _without_unused([step for step in steps if id(step) not in empty])
    writer = _Writer(facts, kept)
    body = ""
    for index, step in enumerate(kept):
        text = writer.write(step)
        together = index and isinstance(step, ValueStep) and isinstance(kept[index - 1], ValueStep)
        body += text if together or not text or not body else f"\n{text}"
    text = writer.assemble(body, title=title, file_name=file_name)
    try:
        ast.parse(text)
    except SyntaxError as error:
        raise UsageError(f"These cells make no script: {error.msg} in {(error.text or '').strip()!r}.") from None
    ways = {way: tuple(s.name for s in kept if isinstance(s, ValueStep) and s.way == way) for way in ("file", "path")}
    return Script(text, ways["file"], ways["path"], len(dead))


def _strip_dead(cells: list[CellStep], wanted: dict[int, list[str]]) -> list[CellStep]:
    """Take all code out of dead cells but their imports, which a live one may use; returns them."""
    imported = {
        name
        for step in cells
        for statement in step.tree.body
        if isinstance(statement, (ast.Import, ast.ImportFrom))
        for name in effects([statement]).binds
    }
    live = live_cells([step.tree for step in cells], wanted, given={*_RANK_NAMES, *imported})
    dead = [step for step, alive in zip(cells, live, strict=True) if not alive]
    for step in dead:
        kept = [s for s in step.tree.body if isinstance(s, (ast.Import, ast.ImportFrom))]
        step.code = "".join(f"{ast.unparse(statement)}\n" for statement in kept)
        step.tree, step.left_out = parse(step.code), ""
    return dead


def _without_unused(steps: list[Step]) -> list[Step]:
    """The steps without values and failed cells' rests that no later cell uses."""
    needed: set[str] = set()
    replaced: set[str] = set()
    """Names that every rank is given anew before a cell uses them."""
    kept: list[Step] = []
    for step in reversed(steps):
        if isinstance(step, CellStep):
            own = effects(step.tree.body)
            if step.left_out and not own.binds & needed:
                step.left_out = _all_left_out(step)
                step.code, step.tree, own = "", parse(""), effects([])
            needed |= own.uses | own.changes
            replaced -= own.uses | own.changes
        elif isinstance(step, ValueStep):
            if step.name not in needed or (step.name in replaced and step.way in ("file", "path")):
                continue
            replaced |= {step.name} if step.ranks is None else set()
            needed |= effects(parse(step.text).body).uses if step.way == "code" else set()
        kept.append(step)
    return kept[::-1]


def _all_left_out(step: CellStep) -> str:
    return "".join(f"# {line}".rstrip() + "\n" for line in step.code.splitlines()) + step.left_out


class _Writer:
    def __init__(self, facts: SessionFacts, steps: Sequence[Step]) -> None:
        self._facts = facts
        self._imports = Imports()
        self._trees: list[ast.Module] = []
        names = {name for step in steps if isinstance(step, CellStep) for name in effects(step.tree.body).binds}
        self._arguments = Arguments(names)
        self._packages = {name for step in steps if isinstance(step, CellStep) for name in packages_in(step.tree)}
        self._helpers: dict[str, str] = {}

    def write(self, step: Step) -> str:
        """The text of one step; empty: it has none."""
        if isinstance(step, CellStep):
            return self._cell(step)
        if isinstance(step, SeedStep):
            return self._seed(step)
        return self._value(step)

    def _cell(self, step: CellStep) -> str:
        for statement in step.imports:
            self._imports.add(statement)
        code = self._with_show(step)
        code = self._imports.lift(code, parse(code)).strip("\n")
        prompt = f"In [{step.cell.number}]" if step.cell.number else "A cell"
        title = f"# {prompt}: %%{step.cell.magic}"
        if step.cell.outcome == "interrupted":
            title += " (was interrupted in the notebook)"
        tree = parse(code)
        self._trees.append(tree)
        if _is_async(tree):
            code = self._awaited(step, code, tree)
        if step.repeat > 1 and code and not step.left_out:
            code = f"for {self._arguments.free('repetition')} in range({step.repeat}):\n{indented(code)}"
        if step.ranks is not None and code:
            self._trees.append(parse("rank"))
            code = self._limited(step.ranks, code, tree)
        if step.left_out:
            where = f" at line {step.cell.failed_line}" if step.cell.failed_line else ""
            failed = f"# It failed there{where} ({step.cell.error}); from that statement on it is left out:"
            code = "\n".join(filter(None, [code, failed, step.left_out.rstrip("\n")]))
        return f"{title}\n{code}\n" if code else ""

    def _with_show(self, step: CellStep) -> str:
        """The cell's code, in which the value that the notebook showed is printed."""
        shown_at_all = step.tree.body and not (step.left_out or step.quiet or step.repeat)
        last = step.tree.body[-1] if shown_at_all else None
        if not isinstance(last, ast.Expr) or not _is_shown(last.value):
            return step.code
        lines = step.code.splitlines()
        segment = ast.get_source_segment(step.code, last) or ""
        shown = ast.unparse(last.value) if isinstance(last.value, ast.Tuple) else segment
        lines[last.lineno - 1 : last.end_lineno] = f"{self._arguments.show}({shown})".splitlines()
        self._helpers["show"] = _SHOW.replace("{name}", self._arguments.show)
        return "\n".join(lines) + "\n"

    def _awaited(self, step: CellStep, code: str, tree: ast.Module) -> str:
        self._imports.add("import asyncio")
        name = f"cell_{step.cell.number or len(self._trees)}"
        names = ", ".join(sorted(effects(tree.body).binds))
        head = f"    global {names}\n" if names else ""
        return f"async def {name}():\n{head}{indented(code)}\n\n\nasyncio.run({name}())"

    def _limited(self, ranks: list[int], code: str, tree: ast.Module) -> str:
        condition = f"rank == {ranks[0]}" if len(ranks) == 1 else f"rank in ({', '.join(map(str, ranks))})"
        group = ""
        if "subgroup" in effects(tree.body).uses:
            group = f"subgroup = dist.new_group({ranks})  # every rank takes part in forming it\n"
        inner = indented(code)
        if not tree.body and "asyncio.run" not in code:
            inner += "\n    pass"
        return f"{group}if {condition}:\n{inner}"

    def _seed(self, step: SeedStep) -> str:
        for statement in ("import random", "import numpy as np"):
            self._imports.add(statement)
        value = f"{step.value} + rank" if step.per_rank else str(step.value)
        of_numpy = f"({value}) % 2**32" if step.per_rank else str(step.value % 2**32)
        code = f"random.seed({value})\nnp.random.seed({of_numpy})\ntorch.manual_seed({value})\n"
        self._trees.append(parse(code))
        return f"# %distributed seed {step.value}{' --per-rank' if step.per_rank else ''}\n{code}"

    def _value(self, step: ValueStep) -> str:
        for statement in step.imports:
            self._imports.add(statement)
        code = self._arguments.code(step)
        if step.scatter_dim is not None:
            helper = self._arguments.share
            self._helpers["share"] = _SHARE.replace("{name}", helper)
            ranks = list(step.ranks) if step.ranks is not None else list(range(self._facts.num_ranks))
            place = "rank" if step.ranks is None else f"{ranks}.index(rank)"
            dim = f", dim={step.scatter_dim}" if step.scatter_dim else ""
            count = "world_size" if step.ranks is None else str(len(ranks))
            line = f"{step.name} = {helper}({step.name}, {place}, {count}{dim})\n"
            code += line if step.ranks is None else f"if rank in ({', '.join(map(str, ranks))},):\n    {line}"
        self._trees.append(parse(code))
        return code

    def assemble(self, body: str, *, title: str, file_name: str) -> str:
        """The whole text."""
        used = set[str]()
        for tree in (*self._trees, *(ast.parse(text) for text in self._helpers.values())):
            found = effects(tree.body)
            used |= found.uses | found.changes
        bound = {name for tree in self._trees for name in effects(tree.body).binds}
        setup = set_up(
            self._facts, used, bound, self._imports, self._arguments, packages=self._packages, file_name=file_name
        )
        end = f"{'torch.distributed' if 'dist' in bound else 'dist'}.destroy_process_group()\n"
        used |= effects(ast.parse(setup).body).uses | {"dist", "asyncio"}
        head = f'"""Exported from {title}. Run it with\n\n'
        head += f"    torchrun --nproc-per-node {self._facts.num_ranks} {file_name}\n"
        head += f'"""\n\n{self._imports.future}'
        helpers = ["\n".join(self._helpers.values()) + "\n"] if self._helpers else []
        pieces = [head + self._imports.render(used), *helpers, setup, body]
        return "\n".join(pieces).rstrip() + f"\n\n{end}"


def _is_shown(value: ast.expr) -> bool:
    """Whether an expression at a cell's end is there to be looked at; of a call that is known of few functions only."""
    if isinstance(value, ast.Call):
        name = getattr(value.func, "attr", getattr(value.func, "id", ""))
        return name in _LOOKS
    return not isinstance(value, (ast.Await, ast.Constant, ast.Yield))


def _is_async(tree: ast.Module) -> bool:
    """Whether the code awaits something outside of functions."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.Await, ast.AsyncFor, ast.AsyncWith)):
            return True
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            waiting += ast.iter_child_nodes(node)
    return False
