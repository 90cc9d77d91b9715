"""How a hook of the register is checked: names, parameters, live objects, versions."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from axon_nb.records import hooks
from axon_nb.records.hooks import Hook, missing_hooks


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
