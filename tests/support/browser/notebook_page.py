"""Jupyter Notebook 7 driven by keys and buttons; what pages send to widgets; pages that are reloaded."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from playwright.sync_api import TimeoutError as PageTimeout

from tests.support.browser.lab_page import LabPage
from tests.support.browser.lab_server import LIMIT, LabServer
from tests.support.kernel import Kernel, Reply

if TYPE_CHECKING:
    from tests.support.browser.lab_page import LabPage


OF_NOTEBOOKS_OWN = "reading 'schema'"
"""What Notebook 7.6 itself throws while a page is loaded."""
_AGAIN_S = 5.0
_PROMPT_DIFFERS = """([i, before]) =>
    document.querySelectorAll('.jp-Notebook .jp-CodeCell')[i].querySelector('.jp-InputPrompt').innerText !== before"""


class NotebookServer(LabServer):
    """Jupyter Notebook 7, whose page is made of JupyterLab's parts."""

    module = "notebook"
    tree = "notebooks"

    def app_options(self, settings: Path) -> list[str]:
        """Its own are the default ones."""
        return []


class NotebookPage(LabPage):
    """As `LabPage`; without Lab's commands."""

    def open_notebook(self, name: str, *, kernel: bool = True) -> None:
        """Show a notebook and wait until its kernel is idle."""
        self.page.goto(self.server.address_of(name))
        self.page.wait_for_selector(".jp-Notebook .jp-CodeCell")
        if kernel:
            idle = ".jp-NotebookKernelStatus-info, .jp-Notebook-ExecutionIndicator[data-status='idle']"
            self.page.locator(idle).first.wait_for(state="attached")

    def run_cell(self, i: int) -> None:
        """Start a cell: again if the page had not loaded its shortcuts yet, or drops it while the kernel connects."""
        before = self.prompt(i)
        for _ in range(round(LIMIT / _AGAIN_S)):
            self.cell(i).locator(".cm-content").click()
            self.page.keyboard.press("Control+Enter")
            with contextlib.suppress(PageTimeout):
                self.page.wait_for_function(_PROMPT_DIFFERS, arg=[i, before], timeout=_AGAIN_S * 1000)
                self.page.wait_for_timeout(500)
                if self.prompt(i) != before:
                    return
        raise TimeoutError(f"cell {i} did not start in {LIMIT:.0f} s")

    def interrupt(self) -> None:
        """Press the stop button."""
        self.page.locator("[data-command='notebook:interrupt-kernel'], [data-jp-item-name='interrupt']").first.click()

    def save_as(self, name: str) -> Any:
        """Save with Ctrl+S; the notebook as it is on disk."""
        before = (self.server.notebooks / name).stat().st_mtime_ns
        self.page.keyboard.press("Escape")
        self.page.keyboard.press("Control+s")
        for _ in range(round(LIMIT * 10)):
            if (self.server.notebooks / name).stat().st_mtime_ns != before:
                try:
                    return self.server.read_notebook(name)
                except ValueError:  # Jupyter's server writes the file in place: it is half written
                    pass
            self.page.wait_for_timeout(100)
        raise TimeoutError(f"{name} was not saved in {LIMIT:.0f} s")

    def real_errors(self) -> list[str]:
        """Errors of the page, without Notebook's own."""
        return [error for error in super().real_errors() if OF_NOTEBOOKS_OWN not in error]


CLOSE_PANELS = """
from axon_nb.cluster.session import current
for t_panel in list(current.session().panels.values()):
    t_panel.close()
current.session().panels.clear()"""
"""A cell that closes all panels: those that stay open go on updating their pictures in the cells of other tests."""


def model_of(reply: Reply) -> str:
    """The model of the first widget that a cell shows."""
    kind = "application/vnd.jupyter.widget-view+json"
    return str(next(bundle[kind]["model_id"] for bundle in reply.displays if kind in bundle))


def send_from_page(kernel: Kernel, model: str, content: dict[str, Any]) -> None:
    """Send a custom message to a widget; nothing answers it."""
    data = {"method": "custom", "content": content}
    kernel.client.shell_channel.send(kernel.client.session.msg("comm_msg", {"comm_id": model, "data": data}))


RELOADS = 3
LIMIT_S = 30.0


def reload_until_shown(page: LabPage, *selectors: str) -> None:
    """Load the page again until all of these are visible, three times at most.

    Where the kernel or the page was late, one reload is not enough. ipywidgets waits 4 s for the states of its widgets,
    then gives up until the cell is over; anywidget gives up on a view that has not started within 2 s.
    """
    missing: list[str] = []
    for _ in range(RELOADS):
        page.reload()
        missing = [selector for selector in selectors if not page.is_shown(selector, limit=LIMIT_S)]
        if not missing:
            return
    raise AssertionError(f"not shown within {LIMIT_S:.0f} s of any of {RELOADS} reloads: {', '.join(missing)}")
