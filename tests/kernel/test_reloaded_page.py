"""What a page asks that is loaded again while a cell runs on the ranks: it must not have to wait for the cell's end."""

from __future__ import annotations

from pathlib import Path

from tests.kernel.driver import Kernel

LIMIT_S = 60.0


def test_the_list_of_widgets_is_told_while_a_cell_runs(kernel: Kernel, tmp_path: Path) -> None:
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
    flag.touch()
    assert kernel.collect(request).ok
    kernel.ok("t_slider.close()")
