"""Settings and environment variables: all of them are in the registers from which docs/settings.md is made."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from axon_nb.cluster.settings import Settings
from axon_nb.compat import launchers
from axon_nb.engine.groups import creation
from axon_nb.records import environment
from scripts import settings_table
from tests.structure.conftest import nodes

_READS = ("get", "setdefault", "getenv")
_TEMPLATES = "axon_nb/export/"
"""Holds the text of scripts, which read variables of their own."""


def registered() -> set[str]:
    """The names of all variables in the register."""
    entries = [value for name, value in vars(environment).items() if name.isupper()]
    single = {entry.name for entry in entries if isinstance(entry, environment.Variable)}
    return single | {name for entry in entries if isinstance(entry, environment.Variables) for name in entry.names}


def read_by_name(path: Path) -> set[str]:
    """The variables that code reads by a literal name: `os.environ.get("X")`, `environ["X"]`."""
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _READS:
            owner, key = ast.unparse(node.func), node.args[0] if node.args else None
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            owner, key = ast.unparse(node.value), node.slice
        else:
            continue
        if isinstance(key, ast.Constant) and isinstance(key.value, str) and re.search(r"environ|getenv", owner):
            names.add(key.value)
    return names


def test_every_variable_that_the_package_reads_is_registered(package_files: list[Path], root: Path) -> None:
    read: dict[str, set[str]] = {}
    for path in package_files:
        text = path.read_text(encoding="utf-8")
        own = set(re.findall(r"\bAXON_NB_[A-Z_]+\b", text))
        name = path.relative_to(root).as_posix()
        read[name] = own | (set() if name.startswith(_TEMPLATES) else read_by_name(path))
    unknown = {name: sorted(found - registered()) for name, found in read.items() if found - registered()}
    assert not unknown, f"not in axon_nb/records/environment.py: {unknown}"
    assert "RANK" in read["axon_nb/records/training/job.py"], "reads are found"
    assert {*creation.DEFAULTS, *launchers._ACCELERATE_PLUGINS} <= registered()


def test_every_setting_and_variable_has_a_docstring() -> None:
    assert settings_table.docstrings(settings_table.SETTINGS, "Settings").keys() == Settings.known().keys()
    variables = {name for name in vars(environment) if name.isupper() and not name.startswith("_")}
    assert settings_table.docstrings(settings_table.VARIABLES).keys() == variables


def test_the_page_is_up_to_date() -> None:
    assert settings_table.main(["--check"]) == 0
