"""Requests of a page that is reloaded while a cell runs: they must not wait for the cell's end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kernel import Kernel

LIMIT_S = 60.0
MAX_LOAD_PER_CORE = "__import__('axon_nb.magics.extension', fromlist=['x'])._MAX_LOAD_PER_CORE"


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
