"""The script's preamble: command line, process group, and the names that every rank of a notebook has."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from pathlib import PurePath

from axon_nb.export.imports import Imports
from axon_nb.export.steps import ValueStep
from axon_nb.records.history import SessionFacts

_FROM_ENVIRONMENT = {"rank": "RANK", "local_rank": "LOCAL_RANK", "world_size": "WORLD_SIZE"}
_ACCELERATED = {"accelerate", "transformers"}
"""Packages whose processes train together on CPUs only if Accelerate is set to use CPUs."""


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
