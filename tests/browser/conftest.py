"""JupyterLab in headless Chromium: one server for all tests, a fresh page for each."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.support.browser.lab_server import LIMIT, LabServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests.support.browser.lab_page import LabPage

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")

CHROMIUM_OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]

WINDOW = {"width": 1300, "height": 900}


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabServer]:
    """The server. A fixture of the whole run, for it takes seconds to start."""
    pytest.importorskip("jupyterlab", reason="needs JupyterLab: pip install jupyterlab")
    with LabServer(tmp_path_factory.mktemp("lab") / "server") as server:
        yield server


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """The browser. Of one module only: while it runs, no other test of the process can use an event loop."""
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    path = next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)
    if path is None:
        pytest.skip(f"needs a browser: one of {', '.join(CHROMIUM_NAMES)} on the PATH")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=CHROMIUM_OPTIONS, timeout=LIMIT * 1000)
        yield browser
        browser.close()


@pytest.fixture
def page(lab: LabServer, chromium: Browser) -> Iterator[LabPage]:
    """A fresh browser page; afterwards its kernels are ended, and an error in its console fails the test."""
    from tests.support.browser.lab_page import LabPage

    context = chromium.new_context(viewport=WINDOW, device_scale_factor=1)
    shown = LabPage(context.new_page(), lab)
    yield shown
    errors = shown.real_errors()
    context.close()
    lab.end_kernels()
    assert not errors, "the page's console has errors:\n" + "\n".join(errors)
