"""Jupyter Notebook 7 as JupyterLab: live views, saved pictures, failures, the stop button, completion."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.browser.conftest import WINDOW
from tests.support.completion import ask_until

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests.support.browser.notebook_page import NotebookPage, NotebookServer

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(900)]

MODEL = "%%distributed\nmodel = torch.nn.Linear(8, 4)\nprint(f'rank {rank} is ready')"
LONG = """%%distributed --watch
import time
while True:
    dist.barrier()
    time.sleep(0.02)"""


@pytest.fixture(scope="module")
def notebook_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NotebookServer]:
    """The server."""
    pytest.importorskip("notebook", minversion="7", reason="needs Notebook 7: pip install notebook")
    from tests.support.browser.notebook_page import NotebookServer

    with NotebookServer(tmp_path_factory.mktemp("notebook") / "server") as server:
        yield server


@pytest.fixture
def notebook(notebook_server: NotebookServer, chromium: Browser) -> Iterator[NotebookPage]:
    """A page; an error in its console fails the test."""
    from tests.support.browser.notebook_page import NotebookPage

    context = chromium.new_context(viewport=WINDOW, device_scale_factor=1)
    shown = NotebookPage(context.new_page(), notebook_server)
    yield shown
    errors = shown.real_errors()
    context.close()
    notebook_server.end_kernels()
    assert not errors, "the page's console has errors:\n" + "\n".join(errors)


def test_notebook_7_session(notebook: NotebookPage, notebook_server: NotebookServer) -> None:
    cells = ["%load_ext axon_nb\n%distributed start -n 2", MODEL, "%shards model", LONG, "%%distributed\n", "1 + 1"]
    notebook_server.write_notebook("seven.ipynb", cells)
    notebook.open_notebook("seven.ipynb")
    notebook.run_and_wait(0)
    notebook.wait_text(0, "2 ranks")
    # The panel; its item is in the menu bar, as there is no status bar.
    notebook.page.locator(".axon-status-item button", has_text="2 ranks, idle").click()
    notebook.page.get_by_role("region", name="Ranks").locator("tbody tr").nth(1).wait_for()
    notebook.run_and_wait(1)
    notebook.wait_text(1, "rank 1 is ready")
    notebook.run_and_wait(2)
    notebook.page.wait_for_selector(".axon-shards tbody tr[data-name]")
    # Live while the cell runs; the stop button ends it, and the views stay above a folded picture.
    notebook.run_cell(3)
    notebook.output(3).locator(".axon-strip").wait_for()
    assert notebook.is_running(3)
    notebook.interrupt()
    notebook.wait_done(3)
    notebook.wait_text(3, "stopped.")
    notebook.output(3).locator("details.axon-picture:not([open]) img").first.wait_for(state="attached")
    assert notebook.output(3).locator(".axon-strip").is_visible()
    # Names of ranks are completed.
    notebook.cell(4).locator(".cm-content").click()
    notebook.page.keyboard.press("Control+End")
    notebook.page.keyboard.type("model.in_fea")
    offered = ".jp-Completer :text('in_features')"
    ask_until(notebook, 4, lambda: notebook.page.keyboard.press("Tab"), offered)
    notebook.page.keyboard.press("Enter")
    notebook.cell(4).locator(".cm-content").get_by_text("model.in_features").wait_for()
    notebook.run_cell(4)
    notebook.wait_text(4, "8")
    notebook.run_and_wait(5)
    notebook.wait_text(5, "2")
    saved = notebook.save_as("seven.ipynb")
    html = "".join("".join(out.get("data", {}).get("text/html", "")) for cell in saved.cells for out in cell.outputs)
    assert html.count("data:image/svg+xml;base64,") >= 3
