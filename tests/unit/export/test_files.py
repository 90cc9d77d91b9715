"""Export of notebook files, including the examples, and the command line."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from axon_nb import cli
from axon_nb.errors import UsageError
from axon_nb.export import export_history, export_notebook
from axon_nb.records.history import ExecutedCell, PushedValues, SessionFacts

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
ON_RANKS = sorted(path for path in EXAMPLES.glob("*.ipynb") if '"%%distributed' in path.read_text(encoding="utf-8"))


def notebook(path: Path, *cells: tuple[int | None, str], error: list[str] | None = None) -> Path:
    """Write a notebook of (prompt, source); the last cell has the error."""
    made = [
        {
            "cell_type": "code",
            "execution_count": number,
            "source": source.splitlines(keepends=True),
            "outputs": [],
            "metadata": {},
        }
        for number, source in cells
    ]
    if error:
        made[-1]["outputs"] = [
            {"output_type": "error", "ename": "CellError", "evalue": "rank 1: boom", "traceback": error}
        ]
    path.write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": "# x"}, *made], "nbformat": 4}))
    return path


def test_notebook_cells_are_read_in_prompt_order(tmp_path: Path) -> None:
    source = notebook(
        tmp_path / "n.ipynb",
        (4, "%%distributed --ranks 1\nprint(step, 'second')"),
        (1, "%distributed start -n 3 --name x\n%distributed config threads=2"),
        (2, "step = 5\n%push step"),
        (3, "%%distributed\nprint('first')"),
        (None, "%%distributed\nprint('never')"),
        (5, "%%distributed\nkept = 1\nbroken = nowhere"),
        error=["[rank 1]", "Cell \x1b[32mIn[5], line 3\x1b[0m"],
    )
    report = export_notebook(source, tmp_path / "t.py")
    text = (tmp_path / "t.py").read_text()
    assert text.index("'first'") < text.index("'second'")
    assert "never" not in text
    assert "torch.set_num_threads(2)" in text
    assert "default=5" in text
    assert "# broken = nowhere" in text
    assert "torchrun --nproc-per-node 3 " in str(report)
    with pytest.raises(UsageError, match="use `--force` to overwrite it"):
        export_notebook(source, tmp_path / "t.py")


@pytest.mark.parametrize("source", ON_RANKS, ids=lambda path: path.stem)
def test_examples_that_have_not_run_are_exported_from_top_to_bottom(source: Path, tmp_path: Path) -> None:
    report = export_notebook(source, tmp_path / "train.py", live_only=source.stem.startswith("0"))
    assert report.undefined == ()
    assert report.paths == ()
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "train.py"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout


def test_script_has_the_branch_that_was_kept_and_no_cell_that_was_tried(tmp_path: Path) -> None:
    source = notebook(
        tmp_path / "n.ipynb",
        (1, "%distributed start -n 2"),
        (2, "%%distributed --try\nx = 1"),
        (3, "%%distributed --branch lr=1e-2,3e-3\nprint('none', lr)"),
        (4, "%%distributed --branch lr=1e-2,3e-3 --keep 3e-3\nprint('kept', lr)"),
        (5, "%%distributed --branch b=1,2 --keep best:loss\nprint('best', b)"),
    )
    report = export_notebook(source, tmp_path / "t.py")
    text = (tmp_path / "t.py").read_text()
    assert report.undefined == ()
    assert "lr = 0.003  # one of 0.01, 0.003\n" in text
    assert "b = 1  # one of 1, 2\n" in text
    assert "x = 1" not in text
    assert "none" not in text


def test_cells_of_auto_mode_are_cells_on_ranks(tmp_path: Path) -> None:
    source = notebook(
        tmp_path / "n.ipynb",
        (1, "%distributed start -n 2"),
        (2, "%distributed auto on --ranks 1"),
        (3, "step = 1\n%push size\nprint(step, size)"),
        (4, "%%local\nplot = 1"),
        (5, "%distributed auto off"),
        (6, "here = 2"),
    )
    export_notebook(source, tmp_path / "t.py")
    text = (tmp_path / "t.py").read_text()
    assert "if rank == 1:\n    step = 1\n" in text
    assert "# %push size: the value comes from the notebook, above" in text
    assert "--size" in text
    assert "plot" not in text
    assert "here = 2" not in text


def test_export_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = notebook(tmp_path / "n.ipynb", (None, "%%distributed\nprint(1)"))
    assert cli.main(["export", str(source), str(tmp_path / "t.py"), "--live-only"]) == 0
    assert "Wrote" in capsys.readouterr().out
    assert cli.main(["export", str(source), str(tmp_path / "t.py")]) == 1
    assert "already exists" in capsys.readouterr().err
    assert cli.main(["export", str(tmp_path / "none.ipynb"), "x.py"]) == 1
    assert cli.main(["export", __file__, "x.py"]) == 1
    assert cli.main(["export", str(source), str(tmp_path / "t.txt")]) == 1
    assert "the script's name must end in .py" in capsys.readouterr().err


def test_outputs_reveal_facts_about_the_ranks(tmp_path: Path) -> None:
    facts = SessionFacts(3, "gloo", threads=5, seed=2**53 + 1)
    source = notebook(
        tmp_path / "n.ipynb",
        (1, "%distributed start -n 9"),
        (2, "%%distributed\nprint('before')"),
        (3, "%distributed restart"),
        (4, "%%distributed\nprint('after')"),
    )
    made = json.loads(source.read_text())
    card = {"output_type": "display_data", "data": {}, "metadata": {"axon_nb": facts.to_json()}}
    made["cells"][3]["outputs"] = [{"output_type": "stream", "text": ["x"]}, card]
    source.write_text(json.dumps(made))
    export_notebook(source, tmp_path / "t.py")
    text = (tmp_path / "t.py").read_text()
    for line in ("torchrun --nproc-per-node 3 t.py", "torch.set_num_threads(5)", f"torch.manual_seed({2**53 + 1})"):
        assert line in text
    assert "before" not in text
    made["cells"] = [made["cells"][2]]
    made["cells"][0]["outputs"] = [{"output_type": "stream", "text": ["Started 7 ranks (gloo); `%dis"]}]
    source.write_text(json.dumps(made))
    assert "--nproc-per-node 7 " in str(export_notebook(source, tmp_path / "u.py"))


def test_pushed_function_of_the_notebook_is_written_as_code(tmp_path: Path) -> None:
    source = "def double(x):\n    return 2 * x\n"
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(source, names)
    history: list[ExecutedCell | PushedValues] = [
        ExecutedCell(1, "", source, "ok"),
        PushedValues(("double", "rows")),
        ExecutedCell(2, "distributed", "print(double(rows))\n", "ok"),
    ]
    values = {"double": names["double"], "rows": [1, 2]}
    report = export_history(history, SessionFacts(2), values, tmp_path / "train.py")
    text = (tmp_path / "train.py").read_text()
    assert "def double(x):" in text
    assert report.data is not None
    assert pickle.loads(report.data.read_bytes()) == {"rows": [1, 2]}
