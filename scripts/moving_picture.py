"""Take the README's moving picture: run `python -m scripts.moving_picture` in the root folder.

Runs a notebook in JupyterLab, in headless Chromium: a cell fails on one rank, the line is named, the corrected cell
runs, and the timeline grows. Writes docs/images/recovery.webp.
"""

from __future__ import annotations

import argparse
import io
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from scripts.generated_page import ROOT
from tests.browser.conftest import CHROMIUM_NAMES, CHROMIUM_OPTIONS
from tests.support.browser.lab_page import LabPage
from tests.support.browser.lab_server import LabServer

LIMIT = 1_500_000
"""Maximum size in bytes."""
WINDOW = {"width": 1000, "height": 900}
FRAME_MS = 250

START = "%load_ext axon_nb\n%distributed start -n 4"
MODEL = """%%distributed
import time
from torch.nn.parallel import DistributedDataParallel

layers = torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1)
model = DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.AdamW(model.parameters())"""
WRONG = """%%distributed
scales = [1.0, 0.5, 0.25]
for step in range(40):
    loss = model(torch.randn(32, 256)).square().mean() * scales[rank]
    loss.backward()
    optimizer.step()
    time.sleep(0.1)"""
RIGHT = WRONG.replace("0.25]", "0.25, 0.125]")
_SET_SOURCE = """([i, text]) => {
    const { content } = window.jupyterapp.shell.currentWidget;
    content.widgets[i].model.sharedModel.setSource(text);
    content.widgets[i].model.clearExecution();
}"""
_SHOW = "(i) => window.jupyterapp.shell.currentWidget.content.widgets[i].node.scrollIntoView({block: 'start'})"


class Film:
    """Frames with their durations."""

    def __init__(self, page: LabPage) -> None:
        self._page = page
        self._frames: list[Image.Image] = []
        self._durations: list[int] = []

    def take(self, milliseconds: int = FRAME_MS) -> None:
        """Add what the page shows now."""
        picture = self._page.page.locator(".jp-NotebookPanel-notebook").first.screenshot()
        self._frames.append(Image.open(io.BytesIO(picture)).convert("RGB"))
        self._durations.append(milliseconds)

    def save(self, path: Path) -> None:
        """Write it as an animated WebP.

        Raises:
            SystemExit: it is too large.
        """
        first, *rest = self._frames
        first.save(path, save_all=True, append_images=rest, duration=self._durations, loop=0, quality=70, method=4)
        if path.stat().st_size > LIMIT:
            raise SystemExit(f"{path} has {path.stat().st_size} bytes; the limit is {LIMIT}")
        print(f"{path}: {len(self._frames)} frames, {sum(self._durations) / 1000:.1f} s, {path.stat().st_size} bytes")


def _film(page: LabPage, path: Path) -> None:
    for i in (0, 1, 3):
        page.run_and_wait(i, limit=120)
    page.page.evaluate(_SHOW, 2)
    film = Film(page)
    film.take(1500)
    page.run_cell(2)
    page.wait_done(2)
    page.wait_text(2, "IndexError", limit=20)
    film.take(4000)
    page.page.evaluate(_SET_SOURCE, [2, RIGHT])
    film.take(1500)
    page.run_cell(2)
    for _ in range(60):
        page.page.wait_for_timeout(FRAME_MS)
        film.take()
        if not page.is_running(2):
            break
    page.wait_done(2)
    film.take(3000)
    film.save(path)


def main(argv: list[str] | None = None) -> int:
    """Take the picture; return 1 if there is no browser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "docs" / "images" / "recovery.webp", help="the file to write"
    )
    options = parser.parse_args(argv)
    path = next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)
    if path is None:
        print(f"needs a browser on the PATH: one of {', '.join(CHROMIUM_NAMES)}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder, LabServer(Path(folder) / "lab") as lab, sync_playwright() as api:
        browser = api.chromium.launch(executable_path=path, args=CHROMIUM_OPTIONS)
        page = LabPage(browser.new_context(viewport=WINDOW, device_scale_factor=1).new_page(), lab)
        try:
            lab.write_notebook("recovery.ipynb", [START, MODEL, WRONG, "%timeline", "%distributed stop"])
            page.open_notebook("recovery.ipynb")
            page.command("application:toggle-left-area")
            _film(page, options.out)
            page.run_and_wait(4, limit=120)
        finally:
            browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
