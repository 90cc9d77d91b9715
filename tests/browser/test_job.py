"""`%watch` and `%memory` in JupyterLab on a real cluster: live, stopped by the button, reloaded, saved."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import nbformat
import pytest

from tests.support.browser.notebook_page import reload_until_shown

if TYPE_CHECKING:
    from tests.support.browser.lab_page import LabPage
    from tests.support.browser.lab_server import LabServer

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]

START = """%load_ext axon_nb
%distributed start -n 4"""
MODEL = """%%distributed
from torch import nn
from axon_nb.parallel import FSDP, make_mesh
import axon_nb, math, time
mesh = make_mesh(dp=2, tp=2)
torch.manual_seed(0)
model = FSDP(nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 64)))
optimizer = model.optimizer(torch.optim.Adam)"""
TRAIN = """%%distributed
for epoch in axon_nb.progress(range(100_000), desc="epochs"):
    for batch in axon_nb.progress(range(10), desc="batches"):
        loss = model(torch.randn(8, 256)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        axon_nb.log(loss=loss + 3 * math.exp(-epoch / 20) + rank / 5, lr=0.1 / (1 + epoch), items=8)
        time.sleep(0.02 + (0.5 if rank == 1 and epoch == 3 and batch == 0 else 0))
        dist.barrier()"""
PANEL = ".axon-watch"
MEMORY = ".axon-memory"
_KERNEL = "window.jupyterapp.shell.currentWidget.context.sessionContext.session.kernel"
_IDLE = f"() => {_KERNEL}.status === 'idle'"
_ANSWERS = f"() => {_KERNEL}.requestIsComplete({{code: '1'}}).then(() => true)"


def _updates(page: LabPage) -> int:
    return int(page.page.locator(PANEL).first.get_attribute("data-updates") or 0)


def _wait_updates(page: LabPage, more_than: int) -> None:
    page.wait_until(f"(n) => Number(document.querySelector('{PANEL}').dataset.updates) > n", more_than)


def _picture(page: LabPage, name: str, selector: str = PANEL) -> None:
    """Where a person wants to look at it, in both themes."""
    if folder := os.environ.get("AXON_NB_SCREENSHOTS"):
        for dark in (False, True):
            page.set_theme(dark=dark)
            page.page.locator(selector).first.screenshot(path=f"{folder}/{name}-{'dark' if dark else 'light'}.png")
        page.set_theme(dark=False)


def _is_live(page: LabPage) -> None:
    """The panel moves, and shows the running job."""
    loss = page.page.locator(f"{PANEL} svg[aria-label^='loss:']")
    loss.wait_for()
    page.wait_until("(s) => Number(document.querySelector(s).dataset.points) > 20", f"{PANEL} svg[aria-label^='loss:']")
    _wait_updates(page, _updates(page) + 2)
    assert page.is_running(4)
    # What is shown is of the last moment: a rank that was late for it is not in it.
    page.page.locator(f"{PANEL} .axon-view-state", has_text="live").wait_for()
    for words in ("In [5]", "items/s"):
        page.page.locator(".axon-watch-heading", has_text=words).wait_for()
    bars = "[...document.querySelectorAll('.axon-watch-bar')].map((bar) => bar.firstChild.innerText)"
    page.wait_until(f"(all) => {bars}.join() === all", "epochs,batches")
    page.page.locator(".axon-memory-bar [data-role=optimizer]").first.wait_for(state="attached")
    loss.focus()
    page.page.keyboard.press("End")
    said = ""
    for _ in range(20):  # some ranks may not have reported the newest steps yet
        page.page.keyboard.press("ArrowLeft")
        said = page.page.locator(f"{PANEL} [aria-live]").inner_text()
        if "over ranks" in said:
            break
    assert re.match("loss, step .*: .* over ranks", said)


def _stop_by_button(page: LabPage) -> None:
    page.page.locator(".axon-watch-stop").click()
    page.page.locator(".axon-watch-heading", has_text="has ended").wait_for()
    page.wait_until("() => document.querySelector('.axon-watch-stop').disabled")
    # Jupyter does not run a cell that is sent before the one before has failed, and the kernel is through with that.
    page.wait_until(_IDLE)
    page.page.evaluate(_ANSWERS)


def _look_at_what_is_saved(page: LabPage) -> None:
    if os.environ.get("AXON_NB_SCREENSHOTS"):
        for i, name in ((2, "watch-saved"), (3, "memory-saved")):
            page.output(i).locator("details > summary").click()
            page.output(i).scroll_into_view_if_needed()
            _picture(page, name, f".jp-Notebook [data-windowed-list-index='{i}'] details")


def test_job_is_watched_stopped_reloaded_and_saved(lab: LabServer, page: LabPage) -> None:
    card = "import axon_nb\naxon_nb.current_cluster()"
    lab.write_notebook("job.ipynb", [START, MODEL, "%watch", "%memory model", TRAIN, TRAIN, card, "%distributed stop"])
    page.open_notebook("job.ipynb")
    for i in range(4):
        page.run_and_wait(i)
    page.page.wait_for_selector(f"{PANEL} tr[data-rank='3']")
    page.wait_until("() => document.querySelector('.axon-watch-stop').disabled")
    page.run_cell(4)
    _is_live(page)
    _picture(page, "watch")
    _picture(page, "memory", ".axon-memory")
    _stop_by_button(page)
    page.wait_done(4)
    page.wait_text(4, "stopped.")
    # Live again after a reload.
    page.save()
    page.run_cell(5)
    _wait_updates(page, _updates(page) + 2)
    reload_until_shown(page, f"{PANEL} tr[data-rank='3']", MEMORY)
    _wait_updates(page, _updates(page) + 2)
    memory = int(page.page.locator(MEMORY).get_attribute("data-updates") or 0)
    page.wait_until(f"(n) => Number(document.querySelector('{MEMORY}').dataset.updates) > n", memory)
    _stop_by_button(page)
    page.run_and_wait(6)
    page.wait_text(6, "dp 2 × tp 2")
    _picture(page, "card", "[data-windowed-list-index='6']")
    _look_at_what_is_saved(page)
    page.run_and_wait(7)
    page.page.locator(f"{PANEL} tr[data-rank='0']", has_text="stopped").wait_for()
    # What is saved needs no kernel.
    saved = page.save()
    for i, words in ((2, "loss"), (3, "optimizer")):
        bundles = [output.data for output in saved.cells[i].outputs if output.output_type == "display_data"]
        html = "".join("".join(bundle.get("text/html", "")) for bundle in bundles)
        assert "data:image/svg+xml;base64," in html
        assert words in html
        assert "<script" not in html
    assert len(nbformat.writes(saved)) < 400_000


BARS = """%%distributed
import time
from tqdm import tqdm
for step in tqdm(range(20), desc="steps"):
    time.sleep(0.1 + 0.02 * rank * (step == 19))
    if step < 19:
        dist.all_reduce(torch.ones(1))"""
"""The ranks end a little apart, so that no two rates are equal."""


def test_bars_of_ranks_that_keep_pace_end_as_one_line(lab: LabServer, page: LabPage) -> None:
    lab.write_notebook("bars.ipynb", ["%load_ext axon_nb\n%distributed start -n 4", BARS, "%distributed stop"])
    page.open_notebook("bars.ipynb")
    page.run_and_wait(0)
    page.run_and_wait(1)
    page.wait_text(1, "[ranks 0-3] steps: 100%")
    assert page.output_text(1).count("100%") == 1
    page.run_and_wait(2)
