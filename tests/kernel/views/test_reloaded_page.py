"""Requests of a page that is reloaded while a cell runs, and what a view says of what it cannot show."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.browser.notebook_page import CLOSE_PANELS
from tests.support.kernel import Kernel

LIMIT_S = 60.0
MAX_LOAD_PER_CORE = "__import__('axon_nb.magics.extension', fromlist=['x'])._MAX_LOAD_PER_CORE"

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


@pytest.fixture
def idle(kernel: Kernel) -> Iterator[Kernel]:
    """A kernel that takes its machine for idle, whatever else runs there."""
    before = kernel.value(MAX_LOAD_PER_CORE)
    kernel.ok("import axon_nb.magics.extension\naxon_nb.magics.extension._MAX_LOAD_PER_CORE = 1e9")
    yield kernel
    kernel.ok(f"axon_nb.magics.extension._MAX_LOAD_PER_CORE = {before}")


def test_kernel_info_and_widget_list_are_served_during_a_cell(idle: Kernel, tmp_path: Path) -> None:
    kernel = idle
    kernel.ok("import ipywidgets\nt_slider = ipywidgets.IntSlider()")
    known = kernel.value("t_slider.comm.comm_id")
    flag = tmp_path / "flag"
    cell = f"import os, time\nprint('on')\nwhile not os.path.exists({str(flag)!r}):\n    time.sleep(0.01)"
    request = kernel.submit(f"%%distributed\n{cell}")
    kernel.wait_for_output(request, "on")
    asked = kernel.client.comm_info("jupyter.widget")
    message = kernel.client.get_shell_msg(timeout=LIMIT_S)
    assert (message["msg_type"], message["parent_header"]["msg_id"]) == ("comm_info_reply", asked)
    assert known in message["content"]["comms"]
    asked = kernel.client.kernel_info()
    message = kernel.client.get_shell_msg(timeout=LIMIT_S)
    assert (message["msg_type"], message["parent_header"]["msg_id"]) == ("kernel_info_reply", asked)
    assert message["content"]["language_info"]["name"] == "python"
    flag.touch()
    assert kernel.collect(request).ok
    kernel.ok("t_slider.close()")


def test_page_waits_for_the_kernel_on_an_overloaded_machine(idle: Kernel, tmp_path: Path) -> None:
    """It needs the time for itself: see `axon_nb.magics.extension`."""
    idle.ok("axon_nb.magics.extension._MAX_LOAD_PER_CORE = -1.0")
    flag = tmp_path / "flag"
    cell = f"import os, time\nprint('on')\nwhile not os.path.exists({str(flag)!r}):\n    time.sleep(0.01)"
    request = idle.submit(f"%%distributed\n{cell}")
    idle.wait_for_output(request, "on")
    kernel_info, widgets = idle.client.kernel_info(), idle.client.comm_info("jupyter.widget")
    answered = [idle.client.get_shell_msg(timeout=LIMIT_S)["parent_header"]["msg_id"]]
    flag.touch()
    answered += [idle.client.get_shell_msg(timeout=LIMIT_S)["parent_header"]["msg_id"] for _ in range(2)]
    assert answered == [widgets, request, kernel_info]
    idle.settle()


def test_kernel_is_reported_idle_after_a_cell(idle: Kernel) -> None:
    """Whatever it asks, and whenever: in a cell, at its end, or several things at once."""
    kernel = idle
    for round_ in range(24):
        cell = kernel.submit(f"%%distributed\nimport time\ntime.sleep({round_ % 3} * 0.02)")
        open_, said = {cell}, list[str]()
        for _ in range(round_ % 5 + 1):
            open_.add(kernel.client.kernel_info())
            open_.add(kernel.client.comm_info("jupyter.widget"))
            time.sleep(round_ % 4 * 0.005)
        while open_:
            message = kernel.client.get_iopub_msg(timeout=LIMIT_S)
            if message["msg_type"] == "status":
                said.append(message["content"]["execution_state"])
                if said[-1] == "idle":
                    open_.discard(message["parent_header"]["msg_id"])
        # From now on the kernel has nothing to do: what it says next is that it answers this.
        last = kernel.client.kernel_info()
        while True:
            message = kernel.client.get_iopub_msg(timeout=LIMIT_S)
            if message["parent_header"].get("msg_id") == last:
                break
            if message["msg_type"] == "status":
                said.append(message["content"]["execution_state"])
        assert said[-1] == "idle", said
        while message["msg_type"] != "status" or message["content"]["execution_state"] != "idle":
            message = kernel.client.get_iopub_msg(timeout=LIMIT_S)


SHOWS = """import os, threading, time
from IPython.display import display
def t_shows():
    while not os.path.exists({!r}):
        time.sleep(0.01)
    display('shown')
threading.Thread(target=t_shows).start()"""


def test_notebook_thread_output_stays_with_the_running_cell(idle: Kernel, tmp_path: Path) -> None:
    """It belongs to that cell, not to a question that was answered meanwhile."""
    kernel = idle
    show, end = tmp_path / "show", tmp_path / "end"
    kernel.ok(SHOWS.format(str(show)))
    cell = f"import os, time\nprint('on')\nwhile not os.path.exists({str(end)!r}):\n    time.sleep(0.01)"
    request = kernel.submit(f"%%distributed\n{cell}")
    try:
        kernel.wait_for_output(request, "on")
        for _ in range(10):
            kernel.client.kernel_info()
            kernel.client.comm_info("jupyter.widget")
        for _ in range(20):
            kernel.client.get_shell_msg(timeout=LIMIT_S)
        show.touch()
        kernel.wait_for_output(request, "shown")
    finally:
        end.touch()  # else the cell would keep all tests after this one waiting
    assert kernel.collect(request).ok


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
