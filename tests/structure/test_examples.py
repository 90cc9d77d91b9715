"""Example notebooks hold no outputs; `scripts/check` compares them with the sources that they are made from."""

from __future__ import annotations

import json
from pathlib import Path


def test_notebooks_hold_no_outputs(root: Path) -> None:
    notebooks = sorted((root / "examples").glob("*.ipynb"))
    assert notebooks
    for path in notebooks:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = [cell for cell in cells if cell["cell_type"] == "code"]
        assert code, path.name
        assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code), path.name
