"""What frameworks read from the environment, and what is left where a framework is another than expected."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from axon_nb.compat import launchers
from axon_nb.compat.environment import set_environment
from axon_nb.records.hooks import missing_hooks


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
