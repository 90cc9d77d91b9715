"""Real `%%distributed --watch` cells on a real cluster in JupyterLab."""

from __future__ import annotations

from typing import TYPE_CHECKING

import nbformat
import pytest

if TYPE_CHECKING:
    from tests.browser.lab_page import LabPage
    from tests.browser.lab_server import LabServer

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]

CANVAS = ".axon-strip-canvas"
TRAIN = """%%distributed --watch
import time
for step in range(12):
    time.sleep(0.1 * (rank + 1))
    dist.all_reduce(torch.ones(1))
print("finished")"""


def test_the_strip_moves_while_the_cell_runs_and_stays_as_a_picture(lab: LabServer, page: LabPage) -> None:
    lab.write_notebook("watched.ipynb", ["%load_ext axon_nb", "%distributed start -n 4", TRAIN, "%distributed stop"])
    page.open_notebook("watched.ipynb")
    page.run_and_wait(0)
    page.run_and_wait(1)
    assert "4 ranks" in page.output_text(1)
    page.run_cell(2)
    clocks = []
    for _ in range(4):
        last = clocks[-1] if clocks else 0.0
        page.page.wait_for_function(f"() => Number(document.querySelector('{CANVAS}')?.dataset.now) > {last} + 0.3")
        clocks.append(float(page.page.evaluate(f"document.querySelector('{CANVAS}').dataset.now")))
        assert page.is_running(2)
    page.wait_done(2)
    assert "[ranks 0-3] finished" in page.output_text(2)
    page.run_and_wait(3)
    page.save()
    saved = lab.read_notebook("watched.ipynb")
    bundles = [output["data"] for output in saved.cells[2].outputs if output.output_type == "display_data"]
    assert "data:image/svg+xml;base64," in bundles[0]["text/html"]
    assert "all_reduce" in bundles[0]["text/html"]
    assert nbformat.writes(saved).count("application/vnd.jupyter.widget-view+json") == 0


def test_the_stop_button_ends_the_cell_and_keeps_the_ranks(lab: LabServer, page: LabPage) -> None:
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
    assert "ranks 0-1 have stopped" in page.output_text(1)
    page.run_and_wait(2)
    assert "[rank 1] ('kept', 1)" in page.output_text(2)
    page.run_and_wait(3)
