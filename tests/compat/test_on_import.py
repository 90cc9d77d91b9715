"""Modules are prepared right after they are imported, and stay the modules that they are."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from axon_nb.compat.environment import after_import


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package with one module in it."""
    monkeypatch.setattr(sys, "meta_path", sys.meta_path.copy())
    name = "prepared_after_import"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text("__version__ = '1.2'\n")
    (folder / "inner.py").write_text("value = 1\n\ndef double():\n    return 2 * value\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    for module in [module for module in sys.modules if module.startswith(name)]:
        del sys.modules[module]


def test_hook_runs_before_import_returns_and_after_reload(package: str) -> None:
    seen: list[Any] = []

    def hook(module: ModuleType) -> None:
        seen.append(module.value)
        module.value = 10 * len(seen)  # type: ignore[attr-defined]

    after_import(f"{package}.inner", hook)
    inner = importlib.import_module(f"{package}.inner")
    assert (seen, inner.double()) == ([1], 20)
    assert "return 2 * value" in inspect.getsource(inner.double)
    assert inner.__loader__.get_source(inner.__name__).startswith("value = 1")
    importlib.reload(inner)
    assert (seen, inner.double()) == ([1, 1], 40)


def test_already_imported_module_is_prepared_at_once(package: str) -> None:
    inner = importlib.import_module(f"{package}.inner")
    seen: list[ModuleType] = []
    after_import(inner.__name__, seen.append)
    assert seen == [inner]
    before = list(sys.meta_path)
    after_import(f"{inner.__name__}.other", seen.append)
    assert sys.meta_path == before


def test_failing_hook_does_not_break_the_import(package: str) -> None:
    def hook(module: ModuleType) -> None:
        raise KeyError("odd")

    after_import(f"{package}.inner", hook)
    with pytest.warns(UserWarning, match=r"could not patch prepared_after_import.inner 1.2 .*: KeyError: 'odd'"):
        assert importlib.import_module(f"{package}.inner").value == 1


def test_missing_module_raises_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", sys.meta_path.copy())
    after_import("no_such_package_anywhere", lambda module: None)
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_package_anywhere'"):
        importlib.import_module("no_such_package_anywhere")
