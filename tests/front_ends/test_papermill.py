"""papermill: a parametrised notebook whose cells run on ranks, and one that fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from tests.support.browser.lab_server import PYTHON_3

pytest.importorskip("papermill", reason="needs papermill: pip install papermill")

PARAMETERS = "num_ranks, scale = 2, 1.0"
START = "%load_ext axon_nb\n%distributed start -n {num_ranks}"


def _notebook(path: Path, *cells: str) -> Path:
    notebook = nbformat.v4.new_notebook(metadata=PYTHON_3)
    notebook.cells = [nbformat.v4.new_code_cell(source, id=f"cell-{i}") for i, source in enumerate(cells)]
    notebook.cells[0].metadata["tags"] = ["parameters"]
    nbformat.write(notebook, path)
    return path


def _run(source: Path, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "papermill", str(source), str(out), "--kernel", "python3", "--no-progress-bar"]
    return subprocess.run([*command, *options], cwd=source.parent, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_parameters_reach_the_ranks_and_a_failure_fails_the_run(tmp_path: Path) -> None:
    source = _notebook(
        tmp_path / "in.ipynb",
        PARAMETERS,
        START,
        "%push scale",
        "%%distributed --watch\nprint(f'rank {rank} of {world_size} has', scale * (rank + 1))",
        "%%distributed\n1 / (rank - 1)",
        "print('not reached')",
    )
    done = _run(source, tmp_path / "out.ipynb", "-p", "num_ranks", "3", "-p", "scale", "0.5")
    assert done.returncode != 0
    assert "ZeroDivisionError" in done.stderr
    saved = nbformat.read(tmp_path / "out.ipynb", as_version=4)
    text = "".join(out.text for cell in saved.cells for out in cell.get("outputs", []) if out.output_type == "stream")
    assert sorted(line for line in text.splitlines() if "of 3 has" in line) == [
        f"[rank {rank}] rank {rank} of 3 has {0.5 * (rank + 1)}" for rank in range(3)
    ]
    assert "not reached" not in text
    errors = [out for cell in saved.cells for out in cell.get("outputs", []) if out.output_type == "error"]
    assert "[rank 1]" in "".join(errors[0].traceback)
