"""Programs in the shapes of scripts that others wrote: the original, its import and the export of that train alike."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from axon_nb.export import export_notebook
from axon_nb.script import import_script
from tests.support.kernel import Kernel
from tests.support.processes import free_port
from tests.support.ranks import forked

PROGRAMS = Path(__file__).resolve().parents[1] / "support" / "programs"
ARGUMENTS = {
    "trainer_class": "2 1",
    "nested_mains": "",
    "fully_sharded": "--steps 2",
    "flat_tensor_parallel": "",
    "small_language_model": "",
    "train_and_test": "--epochs 2",
    "reference_training": "--epochs 2 --opt sgd_nag",
    "one_long_script": "",
}
_LOSS = re.compile(r"rank \d .*loss .*")


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    """A kernel with 2 ranks for all programs."""
    with Kernel() as kernel:
        kernel.ok("%load_ext axon_nb\n%distributed config threads=1\n%distributed start -n 2 --backend gloo")
        kernel.ok("%%distributed\nof_ranks = {'of_ranks', *globals()}")
        yield kernel
        kernel.run("%distributed stop")


def losses(text: str) -> list[str]:
    """The lines with losses, in an order that does not depend on which rank printed first."""
    return sorted(_LOSS.findall(text))


def run(script: Path, arguments: str) -> list[str]:
    """The losses of a script on two processes with torchrun's variables, each of which writes a file."""
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    logs = [script.with_suffix(f".{rank}.log") for rank in range(2)]
    ranks = [
        forked(_run, script, arguments.split(), log, RANK=str(rank), LOCAL_RANK=str(rank), **variables)
        for rank, log in enumerate(logs)
    ]
    for process in ranks:
        process.join()
    texts = [log.read_text() for log in logs]
    assert [process.exitcode for process in ranks] == [0, 0], "\n".join(texts)
    return losses("".join(texts))


def _run(script: Path, arguments: list[str], log: Path) -> None:
    with log.open("w") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    os.chdir(script.parent)
    sys.argv, sys.path[:0] = [str(script), *arguments], [str(script.parent)]
    runpy.run_path(str(script), run_name="__main__")


_IN_EACH_RUN = ("trainer_class", "nested_mains", "fully_sharded")
_EACH = [pytest.param(name, marks=[] if name in _IN_EACH_RUN else pytest.mark.slow) for name in ARGUMENTS]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", _EACH)
def test_imported_program_has_the_losses_of_the_original(name: str, kernel: Kernel, tmp_path: Path) -> None:
    for path in (PROGRAMS / f"{name}.py", PROGRAMS / "random_pairs.py"):
        shutil.copy(path, tmp_path)
    script, notebook, exported = (tmp_path / f"{name}{suffix}" for suffix in (".py", ".ipynb", "_again.py"))
    import_script(script, notebook, arguments=ARGUMENTS[name])
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    start, *sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert start == "%load_ext axon_nb\n%distributed start"
    kernel.ok(f"%%distributed\n%cd -q {tmp_path}\nfor name in globals().keys() - of_ranks:\n    del globals()[name]")
    on_ranks = losses("".join(kernel.ok(source).stdout for source in sources))
    export_notebook(notebook, exported)
    original = run(script, ARGUMENTS[name])
    assert len(original) >= 4
    assert on_ranks == original
    assert run(exported, "") == original
