"""`%timeline` in JupyterLab: live while cells run, with very many spans, after a reload, saved."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import pytest

from axon_nb.cluster.inspection.spans import SpanStore
from axon_nb.records.spans import Span
from axon_nb.widgets.timeline.record import timeline_file
from tests.support.browser.lab_server import LIMIT

if TYPE_CHECKING:
    from typing import Any

    from playwright.sync_api import Browser

    from tests.support.browser.lab_page import LabPage
    from tests.support.browser.lab_server import LabServer

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]

CANVAS = ".axon-timeline-canvas"

TRAIN = """%%distributed
import time
import torch.nn as nn
from axon_nb.parallel import Pipeline
torch.manual_seed(0)
parts = [nn.Sequential(*(nn.Linear(256, 256) for _ in range(3))) for _ in range(world_size)]
pipe = Pipeline(parts, num_microbatches=8, schedule="1F1B", loss=nn.functional.mse_loss)
optimizer = torch.optim.AdamW(pipe.parameters())
print("training", flush=True)
from pathlib import Path
going = torch.ones(1)
while going:
    pipe.step(torch.randn(64, 256), torch.randn(64, 256))
    optimizer.step()
    if rank == 1:
        time.sleep(0.1)
    going = torch.tensor([float(not Path(STOP).exists())])
    dist.all_reduce(going, op=dist.ReduceOp.MIN)"""

FEED = """
import threading, time
from types import SimpleNamespace
from axon_nb.cluster.inspection.spans import SpanStore
from axon_nb.records.spans import Span
from axon_nb.widgets.timeline.view import TimelineView
feed = SimpleNamespace(store=SpanStore(), running_since=time.monotonic_ns())
view = TimelineView(feed, range(8), title="many")
over = threading.Event()
def work():
    kinds, now = ("forward", "backward", "collective", "optimizer"), time.monotonic_ns()
    for batch in range(125):
        feed.store.add(
            Span(i % 8, kinds[(i // 8) % 4], f"step {i % 30}", now + i * 20_000, now + i * 20_000 + 150_000, "0", i)
            for i in range(batch * 1000, batch * 1000 + 1000)
        )
    while not over.wait(0.02):
        view.pump()
threading.Thread(target=work, daemon=True).start()
view"""


def _picture(page: LabPage, name: str, cell: int | None = None) -> None:
    """Where a person wants to look at it."""
    if folder := os.environ.get("AXON_NB_SCREENSHOTS"):
        page.screenshot(Path(folder) / f"{name}.png", cell=cell)


def _number(page: LabPage, name: str) -> int:
    return int(page.page.locator(CANVAS).first.get_attribute(f"data-{name}") or 0)


def _wait_more(page: LabPage, name: str, than: int) -> int:
    page.wait_until(f"(than) => Number(document.querySelector('{CANVAS}').dataset.{name}) > than", than)
    return _number(page, name)


def _use_keys_and_filter(page: LabPage) -> None:
    canvas = page.page.locator(CANVAS)
    canvas.focus()
    before = _number(page, "found")
    for _ in range(6):
        page.page.keyboard.press("+")
    page.wait_until(f"(before) => Number(document.querySelector('{CANVAS}').dataset.found) < before", before)
    page.page.keyboard.press("ArrowDown")
    page.page.keyboard.press("n")
    page.page.locator(".axon-timeline-tip", has_text="took").wait_for()
    page.page.keyboard.press("Home")
    page.page.fill(".axon-timeline input", "optimizer")
    some = f"const {{ found, spans }} = document.querySelector('{CANVAS}').dataset;"
    page.wait_until(f"() => {{ {some} return Number(found) > 0 && Number(found) < Number(spans) / 2; }}")
    page.page.fill(".axon-timeline input", "")
    page.wait_until(f"() => {{ {some} return Number(found) > Number(spans) / 2; }}")


def test_timeline_is_live_responds_to_keys_and_survives_reload(lab: LabServer, page: LabPage) -> None:
    stop = lab.notebooks / "timeline.stop"
    train = TRAIN.replace("STOP", repr(str(stop)))
    cells = ["%load_ext axon_nb\n%distributed start -n 4", "%timeline", train, train, "%distributed stop"]
    lab.write_notebook("timeline.ipynb", cells)
    page.open_notebook("timeline.ipynb")
    page.run_and_wait(0)
    page.run_and_wait(1)
    page.page.wait_for_selector(CANVAS)
    page.run_cell(2)
    page.wait_text(2, "training")
    spans = _wait_more(page, "found", 50)
    for _ in range(3):  # live: it grows while the cell runs
        spans = _wait_more(page, "end", spans)
        assert page.is_running(2)
    page.page.wait_for_selector(".axon-timeline-step canvas")
    for words in ("4 stages, 8 microbatches", "measured", "bubble 27%"):
        page.page.locator(".axon-timeline-step", has_text=words).first.wait_for()
    shown = "[...document.querySelectorAll('.axon-timeline-key')].filter((key) => !key.hidden)"
    legend = f"{shown}.map((key) => key.innerText).join()"
    kinds = ["forward", "backward", "optimizer", "collective", "waiting"]
    page.wait_until(f"(kinds) => kinds.every((kind) => {legend}.includes(kind))", kinds)
    _picture(page, "timeline-live")
    page.set_theme(dark=True)
    page.page.wait_for_selector("#jupyterlab-splash", state="detached")
    _picture(page, "timeline-live-dark")
    page.set_theme(dark=False)

    _use_keys_and_filter(page)
    stop.touch()
    page.wait_done(2)
    caption = page.output(1).locator("details.axon-picture > summary")
    caption.get_by_text("Timeline, In [3], 4 ranks, ").wait_for()
    page.wait_until("() => !document.querySelector('details.axon-picture').open")  # the live view is above it
    caption.click()
    _picture(page, "timeline-saved", cell=1)
    saved = page.save()
    assert len(nbformat.writes(saved)) < 600_000
    html = _html_of(saved.cells[1])
    assert "data:image/svg+xml;base64," in html
    assert "8 microbatches" in html
    assert "<details open " in html

    stop.unlink()
    spans = _number(page, "end")
    page.run_cell(3)
    spans = _wait_more(page, "end", spans)
    page.reload()
    page.page.wait_for_selector(CANVAS)
    spans = _wait_more(page, "end", spans)
    _wait_more(page, "end", spans)
    stop.touch()
    page.run_and_wait(4)


def test_live_view_of_a_cell_begins_at_its_cell_also_the_second_time(lab: LabServer, page: LabPage) -> None:
    sleep = "%%distributed --watch\nimport time\ntime.sleep(4)"
    lab.write_notebook("again.ipynb", ["%load_ext axon_nb\n%distributed start -n 2", sleep, sleep])
    page.open_notebook("again.ipynb")
    for i in (0, 1):
        page.run_and_wait(i)
    page.page.wait_for_timeout(6000)  # idle: no part of any cell
    page.run_cell(2)
    page.page.wait_for_selector(CANVAS)
    page.page.wait_for_timeout(1500)
    view = "document.querySelector('.axon-timeline-canvas').dataset.view.split(',').map(Number)"
    start, end = page.page.evaluate(view)
    assert page.is_running(2)
    assert end - start < 6, "the axis is that of the cell alone"
    assert not page.page.locator(".axon-timeline .axon-view-notice").count(), "no step is complete"
    page.wait_done(2)


def _html_of(cell: Any) -> str:
    bundles = [output["data"] for output in cell.outputs if output.output_type == "display_data"]
    return "".join("".join(bundle.get("text/html", "")) for bundle in bundles)


@pytest.mark.slow
def test_100_000_spans_are_drawn_and_excess_is_dropped(lab: LabServer, page: LabPage) -> None:
    lab.write_notebook("many.ipynb", [FEED, "over.set()"])
    page.open_notebook("many.ipynb")
    page.run_and_wait(0)
    page.page.wait_for_selector(CANVAS)
    _wait_more(page, "end", 124_999)
    assert 100_000 <= _number(page, "spans") <= 120_000
    page.wait_text(0, "older spans were dropped")
    page.page.locator(CANVAS).press("a")
    _wait_more(page, "found", 99_999)
    _picture(page, "timeline-many")
    page.run_and_wait(1)


def test_saved_page_is_a_standalone_timeline(chromium: Browser, tmp_path: Path) -> None:
    store = SpanStore()
    store.set_groups({"0": range(4)})
    for step in range(40):
        for rank in range(4):
            start = step * 10_000_000 + rank * 100_000
            store.add(
                [
                    Span(rank, "forward", "GPT", start, start + 2_000_000),
                    Span(
                        rank,
                        "collective",
                        "all_reduce",
                        start + 4_000_000,
                        start + 6_000_000,
                        "0",
                        4096,
                        -1,
                        -1,
                        step + 1,
                    ),
                    Span(rank, "backward", "backward", start + 2_000_000, start + 7_000_000),
                    Span(rank, "optimizer", "AdamW", start + 7_000_000, start + 8_000_000),
                ]
            )
    path = tmp_path / "timeline.html"
    path.write_text(timeline_file(store.table(), range(4)), encoding="utf-8")
    errors: list[str] = []
    for scheme in ("light", "dark"):
        shown = chromium.new_page(color_scheme=scheme, offline=True)
        shown.set_default_timeout(LIMIT * 1000)
        shown.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        shown.on("pageerror", lambda error: errors.append(str(error)))
        shown.goto(path.as_uri())
        shown.wait_for_function(f"() => document.querySelector('{CANVAS}')?.dataset.found === '640'")
        shown.locator(CANVAS).hover(position={"x": 5, "y": 15})
        tip = "document.querySelector('.axon-timeline-tip').innerText"
        shown.wait_for_function(f"() => /^forward GPT\\s+rank\\s+0\\s+took\\s+2 ms/.test({tip})")
        if folder := os.environ.get("AXON_NB_SCREENSHOTS"):
            shown.screenshot(path=f"{folder}/timeline-file-{scheme}.png")
        shown.close()
    assert errors == []
    without = chromium.new_page(java_script_enabled=False)
    without.set_default_timeout(LIMIT * 1000)
    without.goto(path.as_uri())
    assert without.locator("figure img[src^='data:image/svg+xml']").count() >= 4
    without.close()
