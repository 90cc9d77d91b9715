"""Take the documentation's screenshots of live views: run `python scripts/screenshots.py` in the root folder.

Runs a notebook in JupyterLab, in headless Chromium (one of those that the browser tests look for), and writes
docs/images/VIEW-light.png and VIEW-dark.png. Best on an idle machine: a pipeline's bubble is measured.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from playwright.sync_api import sync_playwright  # noqa: E402 -- the tests' helpers are not installed

from tests.browser.conftest import CHROMIUM_NAMES, CHROMIUM_OPTIONS  # noqa: E402
from tests.support.browser.lab_page import LabPage  # noqa: E402
from tests.support.browser.lab_server import LabServer  # noqa: E402

ANSWER_MS = 200_000
LIMIT = 300_000
"""Maximum size of a picture in bytes."""
WINDOW = {"width": 1240, "height": 1400}

START = """%load_ext axon_nb
%distributed start -n 4"""
MODEL = """%%distributed
import time
import axon_nb
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from axon_nb.parallel import FSDP, Pipeline, make_mesh
from axon_nb.parallel.models import GPT, GPTConfig, next_byte_loss, standard_library, windows
torch.set_num_threads(1)
torch.manual_seed(0)
config = GPTConfig(context=32, hidden=64, heads=4, blocks=2)
model = FSDP(GPT(config))
optimizer = model.optimizer(torch.optim.AdamW, lr=2e-3)
text = standard_library(1 << 18)
generator = torch.Generator().manual_seed(rank)
mesh = make_mesh(dp=2, tp=2)
grid = GPT(GPTConfig(blocks=1))
_ = parallelize_module(grid.block0, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
_ = fully_shard(grid, mesh=mesh["dp"])"""
TRAIN = """%%distributed
for epoch in axon_nb.progress(range(1000), desc="epochs"):
    for _ in axon_nb.progress(range(25), desc="steps"):
        x, y = windows(text, batch=4, seq=config.context, generator=generator)
        loss = next_byte_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        axon_nb.log(loss=loss.detach(), lr=2e-3 * 0.99**epoch, items=4)"""
STEPS = """%%distributed
for _ in range(3):
    x, y = windows(text, batch=4, seq=config.context, generator=generator)
    next_byte_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()"""
PIPELINE = """%%distributed
class Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)
    @staticmethod
    def backward(ctx, grad):
        time.sleep(2 * ctx.seconds)
        return grad, None

class Stage(nn.Module):  # takes a fixed time
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
    def forward(self, x):
        return Wait.apply(self.linear(x), 0.02 + 0.004 * (rank == 2))

pipe = Pipeline([Stage() for _ in range(4)], num_microbatches=8, schedule="1F1B", loss=nn.functional.mse_loss)
pipe_optimizer = torch.optim.AdamW(pipe.parameters())
for _ in range(3):
    pipe.step(torch.randn(32, 64), torch.randn(32, 64))
    pipe_optimizer.step()"""
CELLS = [START, MODEL, "%watch", TRAIN, "%memory model optimizer", STEPS, "%shards grid", "%timeline", PIPELINE]


HANG = """%%distributed
import time
print("hello from rank", rank)
if rank == 1:
    time.sleep(1000)
dist.all_reduce(torch.ones(2))"""


def _shoot_panel(page: LabPage, folder: Path) -> None:
    """The panel beside a cell that hangs."""
    page.page.set_viewport_size({"width": 1000, "height": 600})
    page.server.write_notebook("digits.ipynb", [START, HANG])
    page.open_notebook("digits.ipynb")
    page.command("application:toggle-left-area")
    page.run_and_wait(0, limit=120)
    page.command("axon-nb:toggle-panel")
    page.run_cell(1)
    page.page.locator(".axon-panel", has_text="Waiting for rank 1").wait_for()
    page.page.locator(".axon-panel tbody button", has_text="2").click()
    _shoot(page, "panel", folder, whole=True)
    page.page.locator(".axon-panel").get_by_text("Interrupt", exact=True).click()
    page.wait_done(1)


def _shoot(page: LabPage, view: str, folder: Path, *, whole: bool = False) -> None:
    for dark in (False, True):
        page.set_theme(dark=dark)
        page.page.wait_for_selector("#jupyterlab-splash", state="detached")
        path = folder / f"{view}-{'dark' if dark else 'light'}.png"
        target = page.page if whole else page.page.locator(f".axon-{view}").first
        target.screenshot(path=path)
        if path.stat().st_size > LIMIT:
            raise SystemExit(f"{path} has {path.stat().st_size} bytes; the limit is {LIMIT}")
        print(f"{path}: {path.stat().st_size} bytes")
    page.set_theme(dark=False)


def _ask_what_if(page: LabPage) -> None:
    """Simulate the current setup, then the same on twice as many ranks."""
    reported = "(words) => document.querySelector('.axon-memory-answer')?.textContent.includes(words)"
    simulated = "() => /peak.*simulated/.test(document.querySelector('.axon-memory-answer')?.textContent)"
    page.page.wait_for_function(simulated, timeout=ANSWER_MS)
    ranks = page.page.locator(".axon-memory-what-if input[name=world_size]")
    ranks.fill("8")
    ranks.press("Tab")
    page.page.wait_for_function(reported, arg="on 8 ranks", timeout=ANSWER_MS)
    page.page.wait_for_function(simulated, timeout=ANSWER_MS)


def _take_all(page: LabPage, folder: Path) -> None:
    for i in (0, 1, 2):
        page.run_and_wait(i, limit=120)
    page.run_cell(3)
    page.page.wait_for_function(
        "(s) => Number(document.querySelector(s)?.dataset.points) > 60", arg=".axon-watch svg[aria-label^='loss:']"
    )
    _shoot(page, "watch", folder)
    page.page.locator(".axon-watch-stop").click()
    page.page.locator(".axon-watch-heading", has_text="has ended").wait_for()
    page.wait_done(3)
    for i in (4, 5):
        page.run_and_wait(i, limit=120)
    _ask_what_if(page)
    page.output(4).scroll_into_view_if_needed()
    _shoot(page, "memory", folder)
    page.run_and_wait(6, limit=120)
    page.page.fill(".axon-shards input", "block0. weight")
    page.output(6).scroll_into_view_if_needed()
    _shoot(page, "shards", folder)
    for i in (7, 8):
        page.run_and_wait(i, limit=120)
    page.page.locator(".axon-timeline-step canvas").first.wait_for()
    # Until the last cell's own spans have come, the one before it is shown.
    shown = "() => Number(document.querySelector('.axon-timeline-canvas').dataset.found) > 500"
    page.page.wait_for_function(shown, timeout=ANSWER_MS)
    page.page.locator(".axon-timeline .axon-view-figures dt", has_text="step").wait_for()
    page.output(7).scroll_into_view_if_needed()
    _shoot(page, "timeline", folder)


def main(argv: list[str] | None = None) -> int:
    """Take the screenshots; return 1 if there is no browser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images", help="folder for the pictures")
    parser.add_argument("--panel", action="store_true", help="take only the picture of the panel")
    options = parser.parse_args(argv)
    path = next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)
    if path is None:
        print(f"needs a browser on the PATH: one of {', '.join(CHROMIUM_NAMES)}", file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, LabServer(Path(folder) / "lab") as lab, sync_playwright() as api:
        browser = api.chromium.launch(executable_path=path, args=CHROMIUM_OPTIONS)
        page = LabPage(browser.new_context(viewport=WINDOW, device_scale_factor=1).new_page(), lab)
        try:
            if options.panel:
                _shoot_panel(page, options.out)
                return 0
            lab.write_notebook("views.ipynb", [*CELLS, "%distributed stop"])
            page.open_notebook("views.ipynb")
            _take_all(page, options.out)
            page.run_and_wait(len(CELLS), limit=120)
            _shoot_panel(page, options.out)
        finally:
            browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
