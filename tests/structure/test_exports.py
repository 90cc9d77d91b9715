"""What each module says it offers is what it offers."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import axon_nb
from tests.structure.conftest import module_name


def wrong_exports(name: str) -> str:
    """What is wrong with the `__all__` of a module; empty if nothing is."""
    module = import_module(name)
    exports = getattr(module, "__all__", [])
    missing = [key for key in exports if not hasattr(module, key)]
    if missing:
        return f"exports missing names: {missing}"
    return "" if len(set(exports)) == len(exports) else "exports a name twice"


def test_modules_import_and_their_exports_resolve(package_files: list[Path]) -> None:
    names = [module_name(path) for path in package_files if path.name != "__main__.py"]
    wrong = [f"{name} {finding}" for name in names if (finding := wrong_exports(name))]
    assert not wrong, "\n".join(wrong)


def test_dir_lists_the_exports() -> None:
    assert dir(axon_nb) == sorted(axon_nb.__all__)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'axon_nb' has no attribute 'nothing'"):
        _ = axon_nb.nothing


def test_every_error_is_exported() -> None:
    errors = import_module("axon_nb.errors")
    assert set(errors.__all__) <= set(axon_nb.__all__)


def test_star_import_gives_the_exports() -> None:
    code = "from axon_nb import *; import axon_nb; assert set(axon_nb.__all__) <= set(globals())"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
