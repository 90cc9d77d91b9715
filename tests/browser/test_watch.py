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
START = "%load_ext axon_nb\n%distributed start -n 4"
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


CLOCK = f"Number(document.querySelector('{CANVAS}').dataset.now)"
HEIGHTS = "(views) => views.map((view) => view.getBoundingClientRect().height)"


def test_views_stay_as_they_are_when_the_cell_ends(lab: LabServer, page: LabPage) -> None:
    stop = lab.notebooks / "watched.stop"
    train = TRAIN.replace("STOP", repr(str(stop)))
    again = "%%distributed --watch\n1"
    lab.write_notebook("watched.ipynb", [START, train, again, again, again, "%distributed stop"])
    page.open_notebook("watched.ipynb")
    page.run_and_wait(0)
    page.run_cell(1)
    clock = 0.0
    for _ in range(4):
        page.wait_until(f"(last) => {CLOCK} > last + 0.3", clock)
        clock = float(page.page.evaluate(CLOCK))
        assert page.is_running(1)
    page.page.locator(".axon-strip-states", has_text="waiting in all_reduce").wait_for()
    shown = "document.querySelector('.axon-timeline-canvas').dataset.view"
    canvas = page.page.locator(".axon-timeline-canvas")
    page.wait_until("() => Number(document.querySelector('.axon-timeline-canvas').dataset.found) > 4")
    for key in ("+", "ArrowLeft"):
        before = page.page.evaluate(shown)
        canvas.press(key)
        page.wait_until(f"(before) => {shown} !== before", before)
    zoom = page.page.evaluate(shown)
    views = page.page.locator(".axon-strip, .axon-timeline")
    strip, timeline = views.evaluate_all(HEIGHTS)
    stop.touch()
    page.wait_done(1)
    page.page.locator(".axon-timeline .axon-view-state", has_text="ended").wait_for()
    page.wait_until("() => !document.querySelector('.axon-strip-states').textContent.includes('running')")
    assert page.page.evaluate(shown) == zoom, "of the stretch that was looked at"
    after = views.evaluate_all(HEIGHTS)
    assert after[0] == strip
    assert after[1] >= timeline, "nothing is taken away"
    picture = page.output(1).locator("details.axon-picture")
    assert picture.get_attribute("open") is None
    assert "Activity, In [2], 4 ranks" in picture.inner_text()
    for rank in range(4):
        page.wait_text(1, f"rank {rank} has finished")
    for i in (2, 3, 4):
        page.run_and_wait(i)
    picture.locator("img").first.wait_for()  # the views of this cell are closed now
    page.run_and_wait(5)
    saved = page.save()
    (*_, bundle) = (output["data"] for output in saved.cells[1].outputs if output.output_type == "display_data")
    assert "all_reduce" in bundle["text/plain"]

    # Opened by somebody else: without a kernel, and not trusted.
    saved.metadata.clear()
    nbformat.write(saved, lab.notebooks / "watched-saved.ipynb")
    page.page.goto("about:blank")  # a page whose kernel is ended from outside says so in its console
    lab.end_kernels()
    page.open_notebook("watched-saved.ipynb", kernel=False)
    page.output(1).locator("details[open] img").first.wait_for()
    loaded = "(all) => all.every((image) => image.complete && image.naturalWidth > 0)"
    page.wait_until(f"(pictures) => ({loaded})([...document.querySelectorAll(pictures)])", "details img")
    page.errors.clear()  # the widgets' models are gone with their kernel


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
