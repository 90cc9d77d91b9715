"""papermill: a parametrised notebook whose cells run on ranks, and one that fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from tests.support.browser.lab_server import PYTHON_3
from tests.support.cell_output import by_rank

pytest.importorskip("papermill", reason="needs papermill: pip install papermill")

PARAMETERS = "num_ranks, scale = 2, 1.0"
START = "%load_ext axon_nb\n%distributed start -n {num_ranks}"


def _notebook(path: Path, *cells: str, tagged: int = 0) -> Path:
    notebook = nbformat.v4.new_notebook(metadata=PYTHON_3)
    notebook.cells = [nbformat.v4.new_code_cell(source, id=f"cell-{i}") for i, source in enumerate(cells)]
    notebook.cells[tagged].metadata["tags"] = ["parameters"]
    nbformat.write(notebook, path)
    return path


def _run(source: Path, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "papermill", str(source), str(out), "--kernel", "python3", "--no-progress-bar"]
    return subprocess.run([*command, *options], cwd=source.parent, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_parameters_of_a_cell_for_ranks_reach_these_ranks(tmp_path: Path) -> None:
    source = _notebook(
        tmp_path / "in.ipynb",
        "%load_ext axon_nb\n%distributed start -n 2",
        "%%distributed\nlr = 0.1\nname, sizes = 'a', [1]",
        "%%distributed\nprint(lr, name, sizes)",
        "%%rank 1\nlr = 0.2",
        "# Parameters\nlr = 0.3",
        "%%distributed\nprint('then', lr)",
        "# Parameters\nlr = 0.4",
        tagged=1,
    )
    done = _run(source, tmp_path / "out.ipynb", "-p", "lr", "0.5", "-y", "{name: 'it''s', sizes: [2, null]}")
    assert done.returncode == 0, done.stderr
    saved = nbformat.read(tmp_path / "out.ipynb", as_version=4)
    texts = ["".join(out.text for out in cell.outputs if out.output_type == "stream") for cell in saved.cells]
    assert texts[2] == "Sent lr, name, sizes to the ranks, because the cell above sets parameters there.\n"
    assert by_rank(texts[3]) == {rank: ["0.5 it's [2, None]"] for rank in range(2)}
    assert texts[5] == "Sent lr to rank 1, because the cell above sets parameters there.\n"
    assert sorted(texts[6].splitlines()) == ["[rank 0] then 0.5", "[rank 1] then 0.3"]
    assert texts[7] == ""


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
