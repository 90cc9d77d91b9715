"""Jupyter Notebook 7 and a page of it, driven by keys and buttons as a person does: it shows its commands to nobody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.browser.lab_page import OPEN_LIMIT, LabPage
from tests.browser.lab_server import LabServer

__all__ = ["NotebookPage", "NotebookServer"]

OF_NOTEBOOKS_OWN = "reading 'schema'"
"""What Notebook 7.6 itself throws while a page is loaded."""


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
        self.page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=OPEN_LIMIT * 1000)
        if kernel:
            idle = ".jp-NotebookKernelStatus-info, .jp-Notebook-ExecutionIndicator[data-status='idle']"
            self.page.locator(idle).first.wait_for(state="attached", timeout=OPEN_LIMIT * 1000)

    def run_cell(self, i: int) -> None:
        """Start a cell."""
        self.cell(i).locator(".cm-content").click()
        self.page.keyboard.press("Control+Enter")

    def interrupt(self) -> None:
        """Press the stop button."""
        self.page.locator("[data-command='notebook:interrupt-kernel'], [data-jp-item-name='interrupt']").first.click()

    def save_as(self, name: str) -> Any:
        """Save with Ctrl+S; the notebook as it is on disk."""
        before = (self.server.notebooks / name).stat().st_mtime_ns
        self.page.keyboard.press("Escape")
        self.page.keyboard.press("Control+s")
        for _ in range(600):
            if (self.server.notebooks / name).stat().st_mtime_ns != before:
                break
            self.page.wait_for_timeout(100)
        return self.server.read_notebook(name)

    def real_errors(self) -> list[str]:
        """Errors of the page, without Notebook's own."""
        return [error for error in self.errors if OF_NOTEBOOKS_OWN not in error]
