"""Real `%%distributed --watch` cells on a real cluster in JupyterLab."""

from __future__ import annotations

from typing import TYPE_CHECKING

import nbformat
import pytest

if TYPE_CHECKING:
    from tests.support.browser.lab_page import LabPage
    from tests.support.browser.lab_server import LabServer

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]

CANVAS = ".axon-strip-canvas"
TRAIN = """%%distributed --watch
import time
from pathlib import Path
going = torch.ones(1)
while going:
    time.sleep(0.1 + rank // 3)
    going = torch.tensor([float(not Path(STOP).exists())])
    dist.all_reduce(going, op=dist.ReduceOp.MIN)
print(f"rank {rank} has finished")"""
"""The last rank is late each time; all go on until a file is there."""


def test_strip_moves_during_the_cell_and_becomes_a_picture(lab: LabServer, page: LabPage) -> None:
    stop = lab.notebooks / "watched.stop"
    train = TRAIN.replace("STOP", repr(str(stop)))
    lab.write_notebook("watched.ipynb", ["%load_ext axon_nb", "%distributed start -n 4", train, "%distributed stop"])
    page.open_notebook("watched.ipynb")
    page.run_and_wait(0)
    page.run_and_wait(1)
    page.wait_text(1, "4 ranks")
    page.run_cell(2)
    clock = 0.0
    for _ in range(4):
        page.wait_until(f"(last) => Number(document.querySelector('{CANVAS}').dataset.now) > last + 0.3", clock)
        clock = float(page.page.evaluate(f"document.querySelector('{CANVAS}').dataset.now"))
        assert page.is_running(2)
    page.page.locator(".axon-strip-states", has_text="waiting in all_reduce").wait_for()
    stop.touch()
    page.wait_done(2)
    for rank in range(4):
        page.wait_text(2, f"rank {rank} has finished")
    page.run_and_wait(3)
    saved = page.save()
    bundles = [output["data"] for output in saved.cells[2].outputs if output.output_type == "display_data"]
    assert "data:image/svg+xml;base64," in bundles[0]["text/html"]
    assert "all_reduce" in bundles[0]["text/html"]
    assert nbformat.writes(saved).count("application/vnd.jupyter.widget-view+json") == 0


def test_stop_button_aborts_the_cell_and_keeps_the_ranks(lab: LabServer, page: LabPage) -> None:
    endless = "%%distributed\nkept = rank\nprint('running')\nwhile True:\n    dist.all_reduce(torch.ones(1))"
    lab.write_notebook(
        "stopped.ipynb",
        ["%load_ext axon_nb\n%distributed start -n 2", endless, "%%distributed\n('kept', kept)", "%distributed stop"],
    )
    page.open_notebook("stopped.ipynb")
    page.run_and_wait(0)
    page.run_cell(1)
    page.wait_text(1, "running")
    page.interrupt()
    page.wait_done(1)
    page.wait_text(1, "Ranks 0-1 stopped.")
    page.run_and_wait(2)
    page.wait_text(2, "[rank 1] ('kept', 1)")
    page.run_and_wait(3)
