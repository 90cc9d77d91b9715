"""Writes the script: preamble, steps in order without dead cells and unused values, teardown.

The preamble has the command line, the process group, and the names that every rank of a notebook has.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Sequence
from pathlib import PurePath

from msgspec import Struct

from axon_nb.errors import UsageError
from axon_nb.export.effects import called_name, effects, live_cells
from axon_nb.export.steps import CellStep, CommandStep, History, SeedStep, Step, ValueStep, script_steps
from axon_nb.export.translation import Imports, indent_code, packages_in, parse
from axon_nb.records.history import SessionFacts

_FROM_ENVIRONMENT = {"rank": "RANK", "local_rank": "LOCAL_RANK", "world_size": "WORLD_SIZE"}
_ACCELERATED = {"accelerate", "transformers"}
"""Packages whose processes train together on CPUs only if Accelerate is set to use CPUs."""
_RANK_NAMES = ("rank", "local_rank", "world_size", "device", "world", "mesh", "dist", "torch", "subgroup", "axon_nb")
_DISPLAYED_CALLS = {
    "item",
    "tolist",
    "sum",
    "mean",
    "max",
    "min",
    "numel",
    "size",
    "keys",
    "values",
    "items",
    "len",
    "sorted",
}
_SHARE = '''
def {name}(values, index, count, dim=0):
    """Return the part of `values` for rank `index` of `count`."""
    length = values.shape[dim] if hasattr(values, "shape") else len(values)
    size, longer = divmod(length, count)
    part = slice(index * size + min(index, longer), (index + 1) * size + min(index + 1, longer))
    rows = getattr(values, "iloc", values)
    return rows[(slice(None),) * dim + (part,)] if dim else rows[part]
'''
_SHOW = '''
def {name}(value):
    """Print the value that the notebook displayed below a cell."""
    if value is not None:
        print(f"[rank {rank}] {value!r}", flush=True)
'''
# A DDP model keeps its group alive after destroy_process_group(), so nothing waits for Gloo's threads. One that still
# has to free a tensor when Python ends aborts the process, on Python up to 3.13: pytorch/pytorch#179291.
_LET_GLOO_FINISH = """
if {dist}.get_backend() == "gloo":
    import time

    time.sleep(0.5)  # Gloo's threads may hold tensors; freeing them while Python ends would abort the process
"""


class Arguments:
    """The script's command line: values that the notebook pushed to ranks."""

    def __init__(self, taken: Collection[str]) -> None:
        self._taken = set(taken)
        self._options: dict[str, str] = {}
        self.name = self.unused_name("arguments")
        """Variable with the parsed command line."""
        self.data = self.unused_name("data")
        """Variable with the content of the data file."""
        self.share, self.show = self.unused_name("share"), self.unused_name("show")
        """Names of the helper functions."""
        self.reads_file = False
        self.reads_paths = False

    def unused_name(self, name: str) -> str:
        """Return a similar name that no cell binds."""
        return name if name not in self._taken else self.unused_name(f"{name}_")

    def code(self, step: ValueStep) -> str:
        """Return the lines that assign a variable its value."""
        if step.source == "code":
            return step.text
        if step.source == "literal":
            return f"{step.name} = {step.text}\n"
        if step.source == "file":
            self.reads_file = True
            return f'{step.name} = {self.data}["{step.name}"]\n'
        plain = step.name.strip("_") == step.name
        option = f'"--{step.name.replace("_", "-")}"' if plain else f'"--{step.name}", dest="{step.name}"'
        if step.source == "argument":
            self._options[step.name] = f"add_argument({option}, {_argument_options(step.text)})"
            return f"{step.name} = {self.name}.{step.name}\n"
        self.reads_paths = True
        self._options[step.name] = (
            f'add_argument({option}, type=Path, required=True, metavar="FILE", '
            f'help="file with {step.name}, written by torch.save")'
        )
        return f"{step.name} = torch.load({self.name}.{step.name}, weights_only=False)\n"

    def lines(self) -> str:
        """Return the code that parses the command line; empty without arguments."""
        if not self._options:
            return ""
        parser = self.unused_name("parser")
        added = "".join(f"{parser}.{line}\n" for line in self._options.values())
        return f"{parser} = argparse.ArgumentParser()\n{added}{self.name} = {parser}.parse_args()\n\n"


def _argument_options(text: str) -> str:
    value = ast.literal_eval(text)
    if isinstance(value, bool):
        return f"action=argparse.BooleanOptionalAction, default={text}"
    if isinstance(value, (int, float, str)):
        return f"type={type(value).__name__}, default={text}"
    return f"type=ast.literal_eval, default={text}"


def preamble(
    facts: SessionFacts,
    used: Collection[str],
    bound: Collection[str],
    imports: Imports,
    arguments: Arguments,
    *,
    packages: Collection[str],
    file_name: str,
) -> str:
    """Write the code before the first cell.

    Args:
        facts: Facts about the notebook's ranks.
        used: Names that the script uses.
        bound: Names that its cells bind.
        imports: Receives the imports that this code needs.
        arguments: The command line.
        packages: Packages that its cells import.
        file_name: Name of the script's file.
    """
    for line in ("import os", "import torch", "import torch.distributed as dist"):
        imports.add(line)
    text = arguments.lines()
    if text:
        imports.add("import argparse")
    if "ast.literal_eval" in text:
        imports.add("import ast")
    if arguments.reads_paths:
        imports.add("from pathlib import Path")
    wanted = {name for name in _FROM_ENVIRONMENT if name in used} | ({"local_rank"} if facts.on_gpus else set())
    for name, variable in _FROM_ENVIRONMENT.items():
        if name in wanted:
            text += f'{name} = int(os.environ["{variable}"])\n'
    text += _threads(facts) + _device(facts, used)
    text += (_accelerate(packages) + _deepspeed(packages, imports)) * (not facts.on_gpus) + _group(facts)
    if facts.seed is not None:
        text += f"torch.manual_seed({facts.seed})  # initial seed of the notebook's ranks\n"
    if "world" in used:
        imports.add("from axon_nb.comm import World")
        text += "world = World.init()\n"
    if "mesh" in used and "mesh" not in bound:
        text += "mesh = None\n"
    if "axon_nb" in used:
        imports.add("import axon_nb")
    if arguments.reads_file:
        text += _file(imports, arguments, file_name)
    return text


def _threads(facts: SessionFacts) -> str:
    if facts.threads:
        return f"torch.set_num_threads({facts.threads})  # as on the notebook's ranks; torchrun sets 1\n"
    return (
        "# As on the notebook's ranks, which share the host's cores; torchrun sets 1.\n"
        'torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ["LOCAL_WORLD_SIZE"])))\n'
    )


def _device(facts: SessionFacts, used: Collection[str]) -> str:
    if not facts.on_gpus:
        return 'device = torch.device("cpu")\n' if "device" in used else ""
    return 'device = torch.device("cuda", local_rank % torch.cuda.device_count())\ntorch.cuda.set_device(device)\n'


def _accelerate(packages: Collection[str]) -> str:
    if not _ACCELERATED & set(packages):
        return ""
    return 'os.environ.setdefault("ACCELERATE_USE_CPU", "true")  # otherwise Accelerate trains each process by itself\n'


def _deepspeed(packages: Collection[str], imports: Imports) -> str:
    """Skip DeepSpeed's CPU inference kernels, as on ranks: they need a compiler and half a minute to build."""
    if "deepspeed" not in packages:
        return ""
    imports.add("from importlib import import_module")
    imports.add("from importlib.util import find_spec")
    # Import by name: the attribute `torch` of `deepspeed.comm` is torch itself.
    return (
        'if find_spec("deepspeed"):  # skip C++ that only inference uses\n'
        '    import_module("deepspeed.comm.torch").build_shm_op = lambda: None\n'
    )


def _group(facts: SessionFacts) -> str:
    if facts.backend == "nccl":
        return 'dist.init_process_group("nccl", device_id=device)\n'
    return 'dist.init_process_group("gloo")\n'


def _file(imports: Imports, arguments: Arguments, file_name: str) -> str:
    for line in ("import pickle", "from pathlib import Path"):
        imports.add(line)
    beside = data_file(file_name)
    return (
        f"\n# Values that the notebook pushed to its ranks, exported with this script.\n"
        f'with Path(__file__).with_name("{beside}").open("rb") as file:\n    {arguments.data} = pickle.load(file)\n'
    )


def data_file(file_name: str) -> str:
    """Name of the data file beside a script."""
    return re.sub(r"\W", "_", PurePath(file_name).stem) + "_data.pkl"


def strip_dead(cells: list[CellStep], wanted: dict[int, list[str]]) -> list[CellStep]:
    """Strip dead cells down to their imports, which live cells may use; return the dead cells."""
    imported = {
        name
        for step in cells
        for statement in step.tree.body
        if isinstance(statement, (ast.Import, ast.ImportFrom))
        for name in effects([statement]).binds
    }
    live = live_cells([step.tree for step in cells], wanted, predefined={*_RANK_NAMES, *imported})
    dead = [step for step, alive in zip(cells, live, strict=True) if not alive]
    for step in dead:
        kept = [s for s in step.tree.body if isinstance(s, (ast.Import, ast.ImportFrom))]
        step.code = "".join(f"{ast.unparse(statement)}\n" for statement in kept)
        step.tree, step.omitted = parse(step.code), ""
    return dead


def without_unused(steps: list[Step]) -> list[Step]:
    """Drop values and remains of failed cells that no later cell uses."""
    needed: set[str] = set()
    replaced: set[str] = set()
    """Names that every rank receives again before a cell uses them."""
    kept: list[Step] = []
    for step in reversed(steps):
        if isinstance(step, CellStep):
            step_effects = effects(step.tree.body)
            if step.omitted and not step_effects.binds & needed:
                step.omitted = _omit_all(step)
                step.code, step.tree, step_effects = "", parse(""), effects([])
            needed |= step_effects.uses | step_effects.changes
            replaced -= step_effects.uses | step_effects.changes
        elif isinstance(step, ValueStep):
            if step.name not in needed or (step.name in replaced and step.source in ("file", "path")):
                continue
            replaced |= {step.name} if step.ranks is None else set()
            needed |= effects(parse(step.text).body).uses if step.source == "code" else set()
        kept.append(step)
    return kept[::-1]


def _omit_all(step: CellStep) -> str:
    return "".join(f"# {line}".rstrip() + "\n" for line in step.code.splitlines()) + step.omitted


class Script(Struct, frozen=True):
    """A generated script."""

    text: str
    file_names: tuple[str, ...]
    """Variables that the script reads from the data file beside it."""
    paths: tuple[str, ...]
    """Variables whose files must be named on the command line."""
    omitted: int
    """Number of dead cells that were omitted."""
    commands: tuple[str, ...]
    """Lines of the notebook that gave ranks values which the script does not have."""


def make_script(
    history: History,
    facts: SessionFacts,
    *,
    title: str,
    file_name: str,
    values: Collection[str] = (),
    live_only: bool = False,
) -> Script:
    """Generate the script of a session.

    Args:
        history: Cells and pushes, in order.
        facts: Facts about the ranks.
        title: What is exported, such as the notebook's name.
        file_name: Name of the script's file.
        values: Names of pushed variables that can be written to a data file.
        live_only: Whether to omit cells that the session's final state does not depend on.

    Raises:
        UsageError: no cell ran on ranks.
    """
    steps, wanted = script_steps(history, facts, values)
    every = [step for step in steps if isinstance(step, CellStep)]
    dead = strip_dead(every, wanted) if live_only else []
    empty = {id(step) for step in dead if not step.code}
    kept = without_unused([step for step in steps if id(step) not in empty])
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
        raise UsageError(f"Cannot export these cells: {error.msg} in {(error.text or '').strip()!r}.") from None
    sources = {
        way: tuple(s.name for s in kept if isinstance(s, ValueStep) and s.source == way) for way in ("file", "path")
    }
    commands = tuple(step.line for step in kept if isinstance(step, CommandStep))
    return Script(text, sources["file"], sources["path"], len(dead), commands)


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
        """Return the text of one step; may be empty."""
        if isinstance(step, CellStep):
            return self._cell(step)
        if isinstance(step, SeedStep):
            return self._seed(step)
        if isinstance(step, CommandStep):
            return f"# {step.line}: gave the ranks values that this script does not have\n"
        return self._value(step)

    def _cell(self, step: CellStep) -> str:
        for statement in step.imports:
            self._imports.add(statement)
        code = self._with_display(step)
        code = self._imports.hoist(code, parse(code)).strip("\n")
        prompt = f"In [{step.cell.number}]" if step.cell.number else "A cell"
        title = f"# {prompt}: %%{step.cell.magic}"
        if step.cell.outcome == "interrupted":
            title += " (interrupted in the notebook)"
        tree = parse(code)
        self._trees.append(tree)
        if _is_async(tree):
            code = self._in_coroutine(step, code, tree)
        if step.repeat > 1 and code and not step.omitted:
            code = f"for {self._arguments.unused_name('repetition')} in range({step.repeat}):\n{indent_code(code)}"
        if step.ranks is not None and code:
            self._trees.append(parse("rank"))
            code = self._on_ranks_only(step.ranks, code, tree)
        if step.omitted:
            where = f" at line {step.cell.failed_line}" if step.cell.failed_line else ""
            failed = f"# Failed here in the notebook{where} ({step.cell.error}); the rest is omitted:"
            code = "\n".join(filter(None, [code, failed, step.omitted.rstrip("\n")]))
        return f"{title}\n{code}\n" if code else ""

    def _with_display(self, step: CellStep) -> str:
        """Return the cell's code with the value that the notebook displayed printed."""
        is_displayed = step.tree.body and not (step.omitted or step.quiet or step.repeat)
        last = step.tree.body[-1] if is_displayed else None
        if not isinstance(last, ast.Expr) or not _is_shown(last.value):
            return step.code
        lines = step.code.splitlines()
        segment = ast.get_source_segment(step.code, last) or ""
        shown = ast.unparse(last.value) if isinstance(last.value, ast.Tuple) else segment
        lines[last.lineno - 1 : last.end_lineno] = f"{self._arguments.show}({shown})".splitlines()
        self._helpers["show"] = _SHOW.replace("{name}", self._arguments.show)
        return "\n".join(lines) + "\n"

    def _in_coroutine(self, step: CellStep, code: str, tree: ast.Module) -> str:
        self._imports.add("import asyncio")
        name = f"cell_{step.cell.number or len(self._trees)}"
        names = ", ".join(sorted(effects(tree.body).binds))
        head = f"    global {names}\n" if names else ""
        return f"async def {name}():\n{head}{indent_code(code)}\n\n\nasyncio.run({name}())"

    def _on_ranks_only(self, ranks: list[int], code: str, tree: ast.Module) -> str:
        condition = f"rank == {ranks[0]}" if len(ranks) == 1 else f"rank in ({', '.join(map(str, ranks))})"
        group = ""
        if "subgroup" in effects(tree.body).uses:
            group = f"subgroup = dist.new_group({ranks})  # every rank must call this\n"
        inner = indent_code(code)
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
        """Return the complete script."""
        used = set[str]()
        for tree in (*self._trees, *(ast.parse(text) for text in self._helpers.values())):
            tree_effects = effects(tree.body)
            used |= tree_effects.uses | tree_effects.changes
        bound = {name for tree in self._trees for name in effects(tree.body).binds}
        setup = preamble(
            self._facts, used, bound, self._imports, self._arguments, packages=self._packages, file_name=file_name
        )
        dist_name = "torch.distributed" if "dist" in bound else "dist"
        end = f"{dist_name}.destroy_process_group()\n"
        if not self._facts.on_gpus:
            end = _LET_GLOO_FINISH.lstrip().replace("{dist}", dist_name) + end
        used |= effects(ast.parse(setup).body).uses | {"dist", "asyncio"}
        head = f'"""Exported from {title}. Run it with\n\n'
        head += f"    torchrun --nproc-per-node {self._facts.num_ranks} {file_name}\n"
        head += f'"""\n\n{self._imports.future}'
        helpers = ["\n".join(self._helpers.values()) + "\n"] if self._helpers else []
        pieces = [head + self._imports.render(used), *helpers, setup, body]
        return "\n".join(pieces).rstrip() + f"\n\n{end}"


def _is_shown(value: ast.expr) -> bool:
    """Whether the expression at a cell's end is meant to be displayed; among calls, only known ones are."""
    if isinstance(value, ast.Call):
        return called_name(value) in _DISPLAYED_CALLS
    return not isinstance(value, (ast.Await, ast.Constant, ast.Yield))


def _is_async(tree: ast.Module) -> bool:
    """Whether the code has an `await` outside functions."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.Await, ast.AsyncFor, ast.AsyncWith)):
            return True
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            waiting += ast.iter_child_nodes(node)
    return False
