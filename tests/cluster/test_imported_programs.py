"""Programs in the shapes of scripts that others wrote: the original, its import and the export of that train alike."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from axon_nb.export import export_notebook
from axon_nb.script import import_script
from tests.support.kernel import Kernel

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
    """The losses of a script under torchrun; each rank writes a file, since their lines can mix on a shared pipe."""
    logs = script.with_suffix(".logs")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launch += ["--redirects", "1", "--log-dir", str(logs), str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, *arguments.split()], cwd=script.parent, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return losses("".join(path.read_text() for path in logs.rglob("stdout.log")))


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
