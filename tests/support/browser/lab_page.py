"""A notebook in a browser: open it, run cells, look at what they show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from playwright.sync_api import ConsoleMessage, Locator, Page
from playwright.sync_api import TimeoutError as TooLate

from tests.support.browser.lab_server import LIMIT, LabServer

_OF_OTHERS = ("Comm not found for comm id", "[anywidget] Failed to initialize model")
"""What JupyterLab says when a comm ends that a page which was loaded again never had, and what anywidget throws for a
view that it has not begun within 2 s, as on a busy machine. Each test waits for the views that have to be there."""

_READY = """async (kernel) => {
    const widget = window.jupyterapp?.shell.currentWidget;
    if (!widget?.context) return false;
    await widget.context.ready;
    if (!kernel) return true;
    await widget.context.sessionContext.ready;
    return widget.context.sessionContext.session?.kernel?.status === 'idle';
}"""

_RUN = """(i) => {
    const { content } = window.jupyterapp.shell.currentWidget;
    content.activeCellIndex = i;
    content.widgets[i].model.executionCount = null;  // what it was before is not the number of this run
    window.jupyterapp.commands.execute('notebook:run-cell');
}"""

_PROMPT_IS_NUMBER = """(i) => {
    const cell = document.querySelectorAll('.jp-Notebook .jp-CodeCell')[i];
    return /\\d/.test(cell?.querySelector('.jp-InputPrompt')?.innerText ?? '');
}"""

_SHOWS = """([i, text]) => {
    const cell = document.querySelectorAll('.jp-Notebook .jp-CodeCell')[i];
    return cell?.querySelector('.jp-Cell-outputArea')?.innerText.includes(text) ?? false;
}"""


class LabPage:
    """One browser page on one notebook; `errors` collects what goes wrong in the page."""

    def __init__(self, page: Page, server: LabServer) -> None:
        self.page = page
        self.server = server
        self.errors: list[str] = []
        page.set_default_timeout(LIMIT * 1000)
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.errors.append(f"uncaught: {error}"))
        page.on("dialog", lambda dialog: dialog.accept())

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.errors.append(f"{message.text} ({message.location.get('url', '')})")

    def real_errors(self) -> list[str]:
        """Errors of the page, without those that only tell of a busy machine."""
        return [error for error in self.errors if not any(words in error for words in _OF_OTHERS)]

    def open_notebook(self, name: str, *, kernel: bool = True) -> None:
        """Show a notebook; without `kernel`, one that names no kernel, and start none."""
        self.page.goto(self.server.address_of(name))
        self.page.wait_for_selector(".jp-Notebook .jp-CodeCell")
        if not kernel:
            self.page.locator(".jp-Dialog").get_by_role("button", name="No Kernel").click()
        self.page.wait_for_function(_READY, arg=kernel)

    def reload(self) -> None:
        """Load the page again, as a user does: what is not saved is lost, the kernel goes on."""
        self.page.reload()
        self.page.wait_for_selector(".jp-Notebook .jp-CodeCell")

    def save(self) -> Any:
        """Save the notebook and return it as it is on disk."""
        self.command("docmanager:save")
        path = self.page.evaluate("() => window.jupyterapp.shell.currentWidget.context.path")
        return self.server.read_notebook(path)

    def command(self, name: str, arguments: dict[str, Any] | None = None) -> None:
        """Run one of Lab's commands and wait until it is through."""
        self.page.evaluate("([name, args]) => window.jupyterapp.commands.execute(name, args)", [name, arguments or {}])

    def cell(self, i: int) -> Locator:
        """The i-th code cell, from 0."""
        return self.page.locator(".jp-Notebook .jp-CodeCell").nth(i)

    def output(self, i: int) -> Locator:
        """The output of the i-th code cell."""
        return self.cell(i).locator(".jp-Cell-outputArea")

    def run_cell(self, i: int) -> None:
        """Start a cell; `wait_done` waits for its end."""
        self.page.evaluate(_RUN, i)

    def prompt(self, i: int) -> str:
        """A cell's prompt: `[*]:` while it runs, then `[3]:`."""
        return self.cell(i).locator(".jp-InputPrompt").first.inner_text()

    def is_running(self, i: int) -> bool:
        """Whether a cell runs or waits for its turn."""
        return "*" in self.prompt(i)

    def wait_done(self, i: int, *, limit: float = LIMIT) -> None:
        """Wait until a cell has ended, at most `limit` seconds."""
        self.page.wait_for_function(_PROMPT_IS_NUMBER, arg=i, timeout=limit * 1000)

    def run_and_wait(self, i: int, *, limit: float = LIMIT) -> str:
        """Run a cell to its end and return the text that it shows."""
        self.run_cell(i)
        self.wait_done(i, limit=limit)
        return self.output_text(i)

    def interrupt(self) -> None:
        """Press the stop button."""
        self.command("notebook:interrupt-kernel")

    def restart_kernel(self) -> None:
        """Restart the kernel, as the restart button does once it is confirmed."""
        kernel = "window.jupyterapp.shell.currentWidget.context.sessionContext.session.kernel"
        self.page.evaluate(f"() => {kernel}.restart()")

    def output_text(self, i: int) -> str:
        """The text that a cell shows, widgets' text included; empty while it shows nothing."""
        return "\n".join(self.output(i).all_inner_texts())

    def wait_text(self, i: int, text: str, *, limit: float = LIMIT) -> None:
        """Wait until a cell's output holds a text, at most `limit` seconds; Lab draws it a moment after the end."""
        self.wait_until(_SHOWS, [i, text], limit=limit)

    def is_shown(self, selector: str, *, limit: float) -> bool:
        """Whether something is visible within `limit` seconds."""
        try:
            self.page.wait_for_selector(selector, timeout=limit * 1000)
        except TooLate:
            return False
        return True

    def wait_until(self, condition: str, arg: Any = None, *, limit: float = LIMIT) -> None:
        """Wait until a condition is true in the page, at most `limit` seconds.

        Args:
            condition: A function of JavaScript; it may fail as long as what it looks at is not there.
            arg: What it is called with.
            limit: In seconds.
        """
        self.page.wait_for_function(
            f"(arg) => {{ try {{ return ({condition})(arg); }} catch {{ return false; }} }}",
            arg=arg,
            timeout=limit * 1000,
        )

    def set_theme(self, *, dark: bool) -> None:
        """Switch Lab to its dark or its light theme."""
        self.command("apputils:change-theme", {"theme": "JupyterLab Dark" if dark else "JupyterLab Light"})
        self.page.wait_for_selector(f"body[data-jp-theme-light='{'false' if dark else 'true'}']", state="attached")

    def screenshot(self, path: Path, *, cell: int | None = None) -> None:
        """Save a picture of the page, or of one cell."""
        target = self.page if cell is None else self.cell(cell)
        target.screenshot(path=path)
