"""Every example exists twice, as py:percent source and as a notebook made from it, and neither holds outputs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_notebooks_match_their_sources(root: Path) -> None:
    command = [sys.executable, "-W", "error", "scripts/pair_notebooks.py", "--check"]
    found = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


def test_notebooks_hold_no_outputs(root: Path) -> None:
    notebooks = sorted((root / "examples").glob("*.ipynb"))
    assert notebooks
    for path in notebooks:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = [cell for cell in cells if cell["cell_type"] == "code"]
        assert code, path.name
        assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code), path.name
