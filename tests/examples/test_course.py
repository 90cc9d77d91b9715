"""The solved edition of the course runs on real ranks from top to bottom, and every check passes there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from scripts.build_course import SOURCES, main

pytestmark = pytest.mark.timeout(900)

ROOT = SOURCES.parent
NOTEBOOKS = sorted(path.stem for path in SOURCES.glob("[0-9]*.py"))
IN_EVERY_RUN = ("01_one_program", "04_data_parallelism", "11_bug_hunt")
"""The others run in `make soak`."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in IN_EVERY_RUN else pytest.mark.slow) for name in NOTEBOOKS]
)
def test_solved_notebook_runs_and_passes_its_checks(name: str, tmp_path: Path) -> None:
    assert main(["--edition", "solved", str(tmp_path)]) == 0
    command = [
        sys.executable,
        "scripts/run_notebook.py",
        str(tmp_path / f"{name}.ipynb"),
        "--out",
        str(tmp_path / "out"),
    ]
    environment = {**os.environ, "XDG_DATA_HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    notebook = nbformat.read(tmp_path / "out" / f"{name}.ipynb", as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            planted = "raises-exception" in cell.metadata.get("tags", [])
            assert planted == any(output.output_type == "error" for output in cell.outputs), cell.source
            if re.match(r"check\(", cell.source):
                (shown,) = [output.data["text/plain"] for output in cell.outputs if "data" in output]
                assert "✓" in shown
                assert not re.search("✗|·|Not yet", shown), shown
