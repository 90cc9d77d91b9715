"""Pages of the site that are made from the code: options of all commands, and what errors say."""

from __future__ import annotations

import ast
import contextlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from axon_nb.cluster.cells.source import RANK_MAGICS
from axon_nb.magics.arguments import EXAMPLES
from axon_nb.magics.cells import cell_parser
from axon_nb.magics.data import DataMagics
from axon_nb.magics.distributed import DistributedMagics
from axon_nb.magics.views import JobViewMagics, TimelineMagics, ViewMagics, plan_parser
from axon_nb.remote.tools import TOOLS, WRITING, Limits, Tools
from scripts.generated_page import ROOT

_MAGICS = (DataMagics, ViewMagics, JobViewMagics, TimelineMagics)
_BLOCK = "## `{}`\n\n```text\n{}\n```\n"
_OPTIONS_HEAD = """\
# Options of all commands

What `%distributed start?`, `%pull --help` and `axon-nb doctor --help` print.
[Commands](../commands.md) is the overview.
"""
_ERRORS_HEAD = """\
# Errors

Each message says what happened and what to do about it.
[Troubleshooting](../../help/troubleshooting.md) explains those that users meet first. `…` stands for a name, a number
or a reason.

## Exceptions

```text
{trees}
```

## Messages
"""
_AREAS = {
    "Starting ranks": ("axon_nb/cluster/launch/", "axon_nb/cluster/session/", "axon_nb/host/"),
    "Running cells": ("axon_nb/cluster/cells/", "axon_nb/cluster/failures/", "axon_nb/engine/bootstrap.py"),
    "Repairing": ("axon_nb/cluster/ranks/", "axon_nb/cluster/recovery/", "axon_nb/cluster/rpc/"),
    "Moving data": ("axon_nb/cluster/transfer/", "axon_nb/engine/transfer/", "axon_nb/engine/session.py"),
    "Settings and options": ("axon_nb/cluster/setting", "axon_nb/records/ranks.py", "magics/"),
    "Views": ("axon_nb/cluster/inspection/", "axon_nb/engine/inspection/", "axon_nb/widgets/", "axon_nb/show.py"),
    "Groups and collectives": ("axon_nb/engine/groups/", "axon_nb/comm/"),
    "Parallel models and checkpoints": ("axon_nb/parallel/",),
    "Plans": ("axon_nb/plan/", "axon_nb/records/memory.py"),
    "Horovod's API": ("axon_nb/compat/",),
    "Export and import": ("axon_nb/export/", "axon_nb/script/"),
    "In a training loop": ("axon_nb/records/training/",),
    "The program axon-nb": (
        "axon_nb/cli.py",
        "axon_nb/cluster/endpoint/",
        "axon_nb/doctor/",
        "axon_nb/quickstart.py",
        "axon_nb/remote/",
    ),
}
"""Where messages come from; the first match counts."""


def command_help(name: str) -> str:
    """Return the help of a magic, such as ``%pull``, or of a subcommand of ``%distributed``."""
    bare = name.strip("%")
    if bare in RANK_MAGICS:
        parser = cell_parser(bare)
    elif name == "%%plan":
        parser = plan_parser()
    elif name.startswith("%"):
        parser = getattr(next(kind for kind in _MAGICS if hasattr(kind, bare)), bare).parser()
    else:
        parser = DistributedMagics(None).commands()[name].parser()
    with _wide():
        return str(parser.help())


def program_help(*words: str) -> str:
    """Return what ``axon-nb … --help`` prints."""
    command = [sys.executable, "-m", "axon_nb.cli", *words, "--help"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.rstrip()


def options_page() -> str:
    """Return the page with all options, from the parsers."""
    names = sorted(EXAMPLES, key=lambda name: (not name.startswith("%%"), name.startswith("%"), name))
    blocks = [
        _BLOCK.format(name if name.startswith("%") else f"%distributed {name}", command_help(name)) for name in names
    ]
    words = re.findall(r"^  ([a-z]+)  ", program_help(), re.MULTILINE)
    blocks += [_BLOCK.format(f"axon-nb {word}", program_help(word)) for word in words]
    return "\n".join([_OPTIONS_HEAD, *blocks, tools_section()])


def tools_section() -> str:
    """Return the tools of `axon-nb mcp`, from their definitions."""
    entries = []
    for name in TOOLS:
        tool = Tools(Limits(), can_run=True).function(name)
        parameters = [each for key, each in inspect.signature(tool).parameters.items() if key != "self"]
        note = "\n\nNeeds `--allow-run`." if name in WRITING else ""
        arguments = ", ".join(
            f"{each.name}: {_annotation(each)}" + ("" if each.default is each.empty else f" = {each.default!r}")
            for each in parameters
        )
        entries.append(f"### `{name}`\n\n```text\n{name}({arguments})\n\n{inspect.getdoc(tool)}\n```{note}\n")
    return "\n".join(["## Tools of `axon-nb mcp`\n", *entries])


def _annotation(parameter: inspect.Parameter) -> str:
    found = parameter.annotation
    return found if isinstance(found, str) else inspect.formatannotation(found)


@contextlib.contextmanager
def _wide() -> Iterator[None]:
    """Let argparse use lines of 100 characters, whatever the terminal."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    try:
        yield
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before


class Message(NamedTuple):
    """What an error says."""

    path: str
    """Of its file."""
    error: str
    """The exception's name."""
    text: str
    """With ``…`` for what is inserted."""


def messages() -> list[Message]:
    """Return the messages of all errors of the package that are written where they are raised, in order of files."""
    files = [*(ROOT / "axon_nb").rglob("*.py"), *(ROOT / "magics").rglob("*.py")]
    found = []
    for path in sorted(file for file in files if "axon_nb/magics" not in file.as_posix()):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                error, text = ast.unparse(node.exc.func).rpartition(".")[2], template(node.exc.args[0])
                if error.endswith(("Error", "Interrupt")) and len(text.replace("…", "").split()) >= 3:
                    found.append(Message(path.relative_to(ROOT).as_posix(), error, text))
    return found


def template(node: ast.expr) -> str:
    """Return the text of an expression, with ``…`` for what is only known later."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(template, node.values))
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return "…"


def errors_page() -> str:
    """Return the page of errors and their messages, from the code."""
    trees = "\n\n".join(_tree(ROOT / "axon_nb" / name) for name in ("errors.py", "comm/errors.py"))
    parts = [_ERRORS_HEAD.format(trees=trees)]
    by_area: dict[str, list[Message]] = {area: [] for area in _AREAS}
    for message in messages():
        area = next((area for area, starts in _AREAS.items() if message.path.startswith(starts)), None)
        if area is not None:
            by_area[area].append(message)
    for area, entries in by_area.items():
        rows = dict.fromkeys(f"| `{entry.error}` | {_cell(entry.text)} |" for entry in entries)
        parts.append("\n".join([f"### {area}\n", "| error | message |", "|---|---|", *rows, ""]))
    return "\n".join(parts)


def _tree(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n\n")[2]


def _cell(text: str) -> str:
    """Escape what Markdown would read as markup outside of code."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    escaped = [part if index % 2 else re.sub(r"([\\<>*_\[\]$#`])", r"\\\1", part) for index, part in enumerate(parts)]
    return "".join(escaped).replace("|", "\\|")
