"""Errors about missing packages name the command that installs them."""

from __future__ import annotations

from importlib.metadata import requires

import pytest
from packaging.requirements import Requirement

from axon_nb.cluster.failures import RankError, cell_error, hint_for, missing_package


def raised(text: str, name: str = "ModuleNotFoundError") -> RankError:
    """How a cell fails on a rank."""
    return RankError(0, "raised", name, text, ("line 1",))


@pytest.mark.parametrize("module", ["accelerate", "deepspeed", "transformers"])
def test_missing_framework_is_reported_with_fix(module: str) -> None:
    errors = {0: raised(f"No module named '{module}'"), 1: RankError(1, "aborted", "", "waited in barrier")}
    hint = hint_for(errors.values())
    assert hint == (
        f"`{module}` is not installed where the ranks run. Run `pip install {module}` there, then run the cell again."
    )
    assert hint in "\n".join(cell_error(errors, first=[0], hint=hint)._render_traceback_())


def test_fix_installs_a_package_of_an_extra() -> None:
    extras = {Requirement(text).name for text in requires("axon_nb") or [] if "extra" in text}
    for module in ("accelerate", "cupy", "deepspeed", "pynvml", "tensorboard", "transformers"):
        _, _, command = missing_package(module).partition("`pip install ")
        assert command.partition("`")[0] in extras, module


def test_horovod_is_replaced_by_its_api() -> None:
    assert "import axon_nb.compat.horovod as hvd" in missing_package("horovod.torch")


@pytest.mark.parametrize(
    "error",
    [
        raised("No module named 'numpie'"),
        raised("No module named 'accelerate.tools'"),  # the package is there, and has no such part
        raised("No module named 'accelerate'", "ImportError"),
    ],
)
def test_unknown_packages_get_no_hint(error: RankError) -> None:
    assert hint_for([error]) == ""


@pytest.mark.parametrize(
    "text",
    [
        "No working C++ compiler found in torch._inductor.config.cpp.cxx: (None, 'g++')",
        "Unable to JIT load the cpu_adam op due to ninja not being installed.",
        "Ninja is required to load C++ extensions (pip install ninja to get it)",
    ],
)
def test_missing_compiler_is_reported(text: str) -> None:
    assert hint_for([raised(text, "RuntimeError")]).startswith("This cell compiles C++: install a compiler")
