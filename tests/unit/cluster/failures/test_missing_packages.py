"""Errors about missing packages name the command that installs them."""

from __future__ import annotations

from importlib.metadata import metadata

import pytest

from axon_nb.cluster.failures.hints import hint_for, missing_package
from axon_nb.cluster.failures.report import RankError, cell_error


def raised(text: str, name: str = "ModuleNotFoundError") -> RankError:
    """How a cell fails on a rank."""
    return RankError(0, "raised", name, text, ("line 1",))


@pytest.mark.parametrize("module", ["accelerate", "deepspeed", "transformers"])
def test_missing_framework_names_its_extra(module: str) -> None:
    errors = {0: raised(f"No module named '{module}'"), 1: RankError(1, "aborted", "", "waited in barrier")}
    hint = hint_for(errors.values())
    assert hint == (
        f'`{module}` is not installed where the ranks run. Run `pip install "axon_nb[frameworks]"` there, then run the '
        "cell again."
    )
    assert hint in "\n".join(cell_error(errors, first=[0], hint=hint)._render_traceback_())


def test_named_extras_exist() -> None:
    extras = metadata("axon_nb").get_all("Provides-Extra")
    assert {"frameworks", "gpu"} <= set(extras or [])
    assert "axon_nb[gpu]" in missing_package("cupy")
    assert "pip install tensorboard" in missing_package("tensorboard").replace('"', "")
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
