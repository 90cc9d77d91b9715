"""What each module says it offers is what it offers."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

import axon_nb


def test_module_imports_and_its_exports_resolve(module_name: str) -> None:
    module = import_module(module_name)
    defined = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module_name]
    exports = getattr(module, "__all__", None if any(not name.startswith("_") for name in defined) else [])
    assert exports is not None, f"{module_name} has no __all__"
    assert len(set(exports)) == len(exports)
    missing = [name for name in exports if not hasattr(module, name)]
    assert not missing, f"{module_name}.__all__ names what is not there: {missing}"


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
