"""What cannot be shown is one sentence in every view, and a failing view does not affect cells."""

from __future__ import annotations

import pytest

from tests.support.browser.page_messages import CLOSE_PANELS
from tests.support.kernel import Kernel

REFUSED = {
    "%shards": "the following arguments are required: NAME",
    "%shards t_nothing": "variable 't_nothing' does not exist",
    "%shards t_text": "'t_text' (type str) holds no tensors",
    "%memory t_nothing": "variable 't_nothing' does not exist",
    "%memory t_text": "'t_text' has type str: `%memory` accepts modules and optimizers",
    "%memory t_tensor": "'t_tensor' has type Tensor: `%memory` accepts modules and optimizers",
    "%memory t_text(": "'t_text(' is not the name of a variable",
    "%timeline --ranks 9": "9",
    "%timeline --cell 3,x": "must be the number of a cell, or two, such as 7,9; got '3,x'",
    "%timeline --cell 99999": "ranks have no spans of In [99999]",
    "%timeline --save t.txt": "must end in .json, .html, .csv or .svg",
    "%watch t_text": "%watch has no 't_text'",
    "axon_nb.show.shards()": "needs the name of a variable on the ranks, such as 'model'",
    "axon_nb.show.shards(3)": "such as 'model'; got an object of type int",
    "axon_nb.show.shards('t_text')": "'t_text' (type str) holds no tensors",
    "axon_nb.show.memory(axon_nb)": "such as 'model'; got an object of type module",
    "axon_nb.show.memory('t_nothing')": "variable 't_nothing' does not exist",
    "axon_nb.show.timeline(ranks='9')": "9",
    "axon_nb.show.timeline(cell=99999)": "ranks have no spans of In [99999]",
}


def test_unavailable_data_is_explained_in_one_sentence(kernel: Kernel) -> None:
    kernel.ok("%%distributed\nt_text = 'text'\nt_tensor = torch.ones(2)")
    kernel.ok("import axon_nb")
    for code, words in REFUSED.items():
        refused = kernel.run(code)
        assert refused.ename == "UsageError", (code, refused.traceback)
        assert words in refused.evalue, code
        assert len(refused.evalue.splitlines()) == 1, (code, refused.evalue)
        assert len(refused.traceback.splitlines()) == 1, (code, refused.traceback)
        assert not refused.displays, code
    assert kernel.ok("%%distributed --quiet\n1").ok


@pytest.mark.parametrize(
    ("command", "place"),
    [
        ("%shards t_tensor", "axon_nb.widgets.shards:ShardsView.to_bundle"),
        ("%memory t_layer", "axon_nb.widgets.memory.view:MemoryView.make_content"),
        ("%watch", "axon_nb.widgets.watch.view:WatchView.to_bundle"),
    ],
)
def test_failing_panel_does_not_affect_cells(kernel: Kernel, command: str, place: str) -> None:
    module, _, name = place.partition(":")
    view, _, method = name.partition(".")
    kernel.ok("%%distributed --quiet\nt_tensor, t_layer = torch.ones(2), torch.nn.Linear(2, 2)")
    kernel.ok(command)
    kernel.ok(
        f"import {module} as t_module\nt_view = t_module.{view}\nt_method = t_view.{method}\n"
        "def t_broken(*_): raise ZeroDivisionError('t_broken')\n"
        f"t_view.{method} = t_broken"
    )
    try:
        reply = kernel.ok("%%distributed\nt_tensor = t_tensor + 1\nrank")
        assert "[rank 3] 3" in reply.stdout + str(reply.displays)
        assert "Traceback" not in reply.stdout
    finally:
        kernel.ok(f"t_view.{method} = t_method")
        kernel.ok(CLOSE_PANELS)
