"""Modules are prepared right after they are imported; what frameworks read from the environment."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from axon_nb.compat import launchers
from axon_nb.compat.environment import after_import, set_environment
from axon_nb.records.hooks import missing_hooks


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package with one module in it."""
    monkeypatch.setattr(sys, "meta_path", sys.meta_path.copy())
    name = f"prepared_after_import_{tmp_path.name}"  # hooks stay registered by name
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
    with pytest.warns(UserWarning, match=r"could not patch prepared_after_import\w*.inner 1.2 .*: KeyError: 'odd'"):
        assert importlib.import_module(f"{package}.inner").value == 1


def test_missing_module_raises_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", sys.meta_path.copy())
    after_import("no_such_package_anywhere", lambda module: None)
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_package_anywhere'"):
        importlib.import_module("no_such_package_anywhere")


def test_cpu_ranks_set_framework_variables() -> None:
    environ = {"ACCELERATE_USE_CPU": "false", "PATH": "/usr/bin"}
    set_environment("cpu", local_rank=0, environ=environ)
    assert environ["ACCELERATE_USE_CPU"] == "true", "whatever the notebook has inherited: else ranks train apart"
    assert (environ["DS_ACCELERATOR"], environ["ACCELERATE_TORCH_DEVICE"]) == ("cpu", "cpu")
    chosen = {"DS_ACCELERATOR": "xpu"}
    set_environment("cpu", local_rank=0, environ=chosen)
    assert chosen["DS_ACCELERATOR"] == "xpu"


def test_gpu_ranks_set_framework_variables() -> None:
    environ: dict[str, str] = {}
    set_environment("cuda:1", local_rank=1, environ=environ)
    assert environ.pop("ACCELERATE_TORCH_DEVICE") == "cuda:1"
    assert not [name for name in environ if name.startswith("ACCELERATE")]
    set_environment("cuda:0", local_rank=1, environ=environ)
    assert environ["ACCELERATE_BYPASS_DEVICE_MAP"] == "true", "two ranks on one card"


def test_ninja_next_to_python_is_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    environ = {"PATH": str(tmp_path / "empty")}
    set_environment("cpu", local_rank=0, environ=environ)
    assert environ["PATH"] == str(tmp_path / "empty")
    (tmp_path / "ninja").touch(mode=0o755)
    set_environment("cpu", local_rank=0, environ=environ)
    assert environ["PATH"].endswith(f":{tmp_path}")
    set_environment("cpu", local_rank=0, environ=environ)
    assert environ["PATH"].count(str(tmp_path)) == 2, "it is found there now"


def test_accelerate_without_the_hooks_is_reported() -> None:
    other = ModuleType("accelerate.state")
    with pytest.warns(UserWarning, match="this version lacks state.PartialState.*Check `accelerator.num_processes`"):
        launchers.synchronise_on_cpus(other, world_size=2)


def test_deepspeed_without_the_hooks_is_detected() -> None:
    assert missing_hooks("deepspeed.setup", backend=ModuleType("a"), engine=ModuleType("b")) == [
        "backend.build_shm_op",
        "engine.DeepSpeedEngine.__init__",
        "engine.DeepSpeedEngine.step",
    ]
