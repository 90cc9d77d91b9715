"""The package loads its widgets only when they are asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

import axon_nb.widgets


def test_import_loads_no_widget() -> None:
    code = "import sys, axon_nb.widgets; assert not {'anywidget', 'ipywidgets', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_names_are_those_of_their_modules() -> None:
    from axon_nb.widgets.cell.views import RankStrip

    assert dir(axon_nb.widgets) == sorted(axon_nb.widgets.__all__)
    assert axon_nb.widgets.RankStrip is RankStrip
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = axon_nb.widgets.nothing
