"""The example on a loss that differs: each comparison names the cause that the next cells fix."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.test_notebooks_run import ROOT, run_notebook, streams


@pytest.mark.slow
def test_causes_of_another_loss_are_named_one_after_the_other(tmp_path: Path) -> None:
    notebook = run_notebook(ROOT / "examples" / "13_the_loss_differs.py", tmp_path)
    reports = [
        output["data"]["text/plain"]
        for cell in notebook.cells
        if "--compare" in cell.source.partition("\n")[0]
        for output in cell.outputs
        if "text/plain" in output.get("data", {})
    ]
    expected = [
        "Each rank normalises its own part of the batch.",
        "means over unequal parts of what is averaged",
        "agree with those of one rank",
        "the all-reduce in forward is missing",
        "it is summed over 2 ranks once too often",
        "agree with those of one rank",
    ]
    assert len(reports) == len(expected)
    assert [words for words, report in zip(expected, reports, strict=True) if words not in report] == []
    shown = streams(notebook)
    (alone,) = re.findall(r"one process: the loss is ([0-9.]+)", shown)
    wrong, right = re.findall(r"two ranks: the loss is ([0-9.]+)", shown)
    assert abs(float(wrong) - float(alone)) > 0.01
    assert float(right) == pytest.approx(float(alone), abs=2e-5)
