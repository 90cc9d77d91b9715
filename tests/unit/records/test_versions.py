"""What is checked of other packages: registered hooks, floors, tested versions, and torch's adapter."""

from __future__ import annotations

import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packaging.requirements import Requirement

from axon_nb.records import hooks
from axon_nb.records.hooks import TESTED, Hook, are_tested, install_command, missing_hooks
from axon_nb.torch_api import Torch210, Torch211, Torch212, Torch213, Torch214, TorchApi, adapter_for, torch_api

ROOT = Path(__file__).resolve().parents[3]


class Thing:
    """A class with one attribute of its objects, seen in its methods alone."""

    kind = "thing"

    def __init__(self) -> None:
        self._hidden = 1

    @classmethod
    def make(cls, size: int) -> Any:
        return getattr(cls, "_by_name", size)


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Checks a hook with these fields into the module `sample`, which has `Thing`."""
    module = ModuleType("sample")
    module.Thing = Thing  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sample", module)

    def check(*needs: str, given: dict[str, Any] | None = None, **fields: Any) -> list[str]:
        entry = Hook("a.hook", "sample", (), "nothing", needs=needs, **fields)
        monkeypatch.setattr(hooks, "hook", {"a.hook": entry}.__getitem__)
        hooks._installed.cache_clear()
        return missing_hooks("a.hook", **(given or {}))

    return check


def test_names_are_found_on_classes_and_in_their_methods(missing: Any) -> None:
    there = ("sample:Thing", "sample:Thing.kind", "sample:Thing._hidden", "sample:Thing._by_name", "sample:")
    assert missing(*there) == []
    assert missing("sample:Other", "sample:Thing.gone", "sample:Thing._hidden.more", "no_module:x", "no_module:") == [
        "sample.Other",
        "sample.Thing.gone",
        "sample.Thing._hidden.more",
        "no_module.x",
        "no_module",
    ]


def test_hooks_are_found_on_c_classes(missing: Any) -> None:
    assert missing("builtins:dict.items", "builtins:dict._hidden") == ["builtins.dict._hidden"]


def test_hook_parameters_are_checked(missing: Any) -> None:
    assert missing("sample:Thing.make(size=)", "sample:Thing.make(length=)", "sample:Thing.gone(size=)") == [
        "sample.Thing.make(length=)",
        "sample.Thing.gone(size=)",
    ]
    assert missing("math:hypot(x=)") == [], "C code need not say"


def test_live_object_is_checked_instead_of_its_class(missing: Any) -> None:
    objects = {"thing": "sample:Thing", "thing.part": "sample:Thing", "module": "sample:"}
    needs = ("thing._hidden", "thing.part.kind", "module.Thing")
    assert missing(*needs, objects=objects) == []
    bare = SimpleNamespace(part=None)
    assert missing(*needs, objects=objects, given={"thing": bare}) == ["thing._hidden", "thing.part.kind"]


def test_check_runs_only_if_all_names_exist(missing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = sys.modules["sample"]
    module.problems = lambda thing=None: ["something else"] if thing is None else []
    assert missing("sample:Thing", check="sample:problems") == ["something else"]
    assert missing("sample:gone", check="sample:problems") == ["sample.gone"]
    assert missing(check="sample:problems", given={"thing": 1}) == []


@pytest.mark.parametrize(
    ("version", "fields", "is_used"),
    [
        ("2.14.1+cu130", {"since": "2.14"}, True),
        ("2.14.1+cu130", {"since": "2.15"}, False),
        ("2.9", {"since": "2.14"}, False),
        ("2.14.1", {"before": "2.14"}, False),
        ("2.13.9", {"before": "2.14"}, True),
        ("2.13", {"since": "2.12", "before": "2.14"}, True),
        ("2.13", {"only_if": "sample:Thing.kind"}, True),
        ("2.13", {"only_if": "sample:Nothing"}, False),
    ],
)
def test_hook_applies_to_its_versions(missing: Any, version: str, fields: dict[str, str], is_used: bool) -> None:
    module: Any = sys.modules["sample"]
    module.__version__ = version
    assert missing("sample:gone", **fields) == (["sample.gone"] if is_used else [])


def test_optional_package_is_not_imported(missing: Any) -> None:
    sys.modules.pop("colorsys", None)
    assert missing("colorsys:gone", if_loaded=True) == []
    assert "colorsys" not in sys.modules
    assert missing("sample:gone", if_loaded=True) == ["sample.gone"]


def test_unknown_group_raises() -> None:
    with pytest.raises(KeyError, match="no_such"):
        missing_hooks("no_such")


@pytest.mark.parametrize(
    ("package", "fix"),
    [
        ("torch", 'Run `pip install "torch>=2.8,<2.16"`.'),
        ("accelerate", 'Run `pip install "accelerate==1.15.*"`.'),
        ("Python", "Use Python 3.14."),
    ],
)
def test_fix_names_a_tested_version(package: str, fix: str) -> None:
    assert Hook("a.hook", package, (), "nothing").fix == fix


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


@pytest.mark.parametrize(
    ("versions", "tested"),
    [
        ({"torch": "2.8.0"}, True),
        ({"torch": "2.15.9+cu132"}, True),
        ({"torch": "2.16.0.dev20261101"}, False),
        ({"torch": "2.7.1"}, False),
        ({"torch": "2.13.0", "ipykernel": "7.4.0", "ipython": "9.18.1", "ipyparallel": "9.2.0"}, True),
        ({"torch": "2.13.0", "ipykernel": "8.0.0a1"}, False),
        ({"ipython": "10"}, False),
        ({"torch": "unknown"}, False),
    ],
)
def test_tested_version_range_is_half_open(versions: dict[str, str], tested: bool) -> None:
    assert are_tested(versions) is tested


def test_fix_command_installs_tested_versions() -> None:
    lowest, above = TESTED["torch"]
    assert install_command("torch") == f'pip install "torch>={lowest},<{above}"'


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.8.0+cu128", Torch210),
        ("2.10.0a0+b4e4ee81d3", Torch210),
        ("2.11.0", Torch211),
        ("2.11.1+cu130", Torch211),
        ("2.12.0a0+git123", Torch212),
        ("2.13.0+cpu", Torch213),
        ("2.14.1+cu130", Torch214),
        ("2.15.0+cu132", TorchApi),
        ("2.16.0.dev20261101", TorchApi),
        ("3.0.0", TorchApi),
    ],
)
def test_version_selects_its_adapter_and_newer_ones_the_newest(version: str, expected: type[TorchApi]) -> None:
    assert adapter_for(version) is expected


def test_adapter_methods_exist_in_this_torch() -> None:
    api = torch_api()
    assert type(api) is adapter_for(torch.__version__)
    assert callable(getattr(dist.ProcessGroup, api.gather_method))
    assert callable(getattr(dist.ProcessGroup, api.scatter_method))
    assert callable(api.all_gather_single)
    assert callable(api.reduce_scatter_single)
    fields = {name for name, value in vars(dist.distributed_c10d._World).items() if isinstance(value, property)}
    assert set(api.world_fields) <= fields
    assert bool(api.nccl_classes()) == dist.is_nccl_available()
