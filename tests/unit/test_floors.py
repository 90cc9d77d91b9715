"""The floors that `%load_ext` checks are those of pyproject.toml, and one sentence names what is below them."""

from __future__ import annotations

import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from axon_nb.records import hooks

ROOT = Path(__file__).resolve().parents[2]


def test_floors_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requires = {entry.name: str(entry.specifier) for entry in map(Requirement, project["dependencies"])}
    assert {name: requires[name].removeprefix(">=") for name in hooks.FLOORS} == hooks.FLOORS


def test_installed_packages_are_above_the_floors() -> None:
    assert hooks.unmet_floor() == ""


def test_old_package_is_named_with_its_version_and_the_line_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hooks.FLOORS, "psutil", "999")
    assert hooks.unmet_floor() == (
        f"axon_nb needs psutil 999 or newer; got {metadata.version('psutil')}. "
        'Run `%pip install "psutil>=999"`, then restart the kernel.'
    )


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "FLOORS", {"no-such-package": "1"})
    assert hooks.unmet_floor().endswith('not installed. Run `%pip install "no-such-package>=1"`.')


def test_kernel_that_runs_another_version_is_to_be_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipykernel", SimpleNamespace(__version__="6.17.1"))  # type: ignore[misc]
    assert hooks.unmet_floor().startswith("This kernel runs ipykernel 6.17.1, and ")
    assert hooks.unmet_floor().endswith("is installed: restart the kernel.")
