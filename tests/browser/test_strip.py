"""The strip in JupyterLab: it moves while a cell runs, and its last state remains."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.browser.notebook_page import reload_until_shown

if TYPE_CHECKING:
    from tests.support.browser.lab_page import LabPage
    from tests.support.browser.lab_server import LabServer

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]

STRIP = ".axon-strip"
CANVAS = ".axon-strip-canvas"
STATES = ".axon-strip-states [role=listitem]"
FAILED = "rank 3: failed after 2.0 s"

FEED = '''
import asyncio, threading, time
import re
from pathlib import Path
from axon_nb.records.telemetry import Activity, RankState
from axon_nb.widgets.cell.views import RankStrip

def feed(strip, over, began):
    """Four ranks: 0 and 1 compute and meet, 2 is late for every meeting, 3 fails after two seconds of the strip."""
    first = min(time.monotonic_ns(), began + 10**9)
    strip.add([RankState(rank, Activity.RUNNING, first, cell=1, since_ns=began, line=2) for rank in range(4)])
    while not over.wait(0.1):
        now = time.monotonic_ns()
        phase = (now - began) / 1e9 % 1.5
        since = now - int(phase * 1e9)

        def state(rank, activity, since, **more):
            return RankState(rank, activity, now, cell=1, since_ns=since, **more)

        for rank in range(4):
            if rank == 3 and now - began >= 2 * 10**9:
                strip.add([state(rank, Activity.FAILED, began + 2 * 10**9)])
            elif rank < 2 and phase > 0.6:
                meeting = since + 600_000_000
                activity = Activity.WAITING if phase > 0.85 else Activity.COLLECTIVE
                strip.add([state(rank, activity, meeting, call="all_reduce", line=4)])
            else:
                strip.add([state(rank, Activity.RUNNING, since, line=2 + int(phase * 4) % 3)])

async def watch(stop, title="In [1]"):
    over, strip = threading.Event(), RankStrip(range(4), title=title)
    strip.start()
    strip._start_ns = began = time.monotonic_ns()  # what it took to show it does not count
    thread = threading.Thread(target=feed, args=(strip, over, began), daemon=True)
    thread.start()
    try:
        while not Path(stop).exists():
            await asyncio.sleep(0.1)
            strip.flush()
    finally:
        over.set()
        thread.join()
        strip.finish()
'''


def watched(lab: LabServer, name: str) -> Path:
    """A notebook whose second cell shows a strip until the returned file exists."""
    stop = lab.notebooks / f"{name}.stop"
    lab.write_notebook(f"{name}.ipynb", [FEED, f"await watch({str(stop)!r})"])
    return stop


def wait_until_later(page: LabPage, seconds: float) -> None:
    """Wait until the strip's clock is past so many seconds."""
    page.wait_until(f"(seconds) => Number(document.querySelector('{CANVAS}').dataset.now) > seconds", seconds)


def wait_until_failed(page: LabPage) -> None:
    """Wait until the strip says of rank 3 what it says of it to the end."""
    page.wait_until(f"(text) => document.querySelectorAll('{STATES}')[3].textContent === text", FAILED)


def num_colored(page: LabPage) -> int:
    """How many pixels of the canvas are drawn on."""
    count = (
        "(c) => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.filter((v, i) => i % 4 === 3 && v).length"
    )
    return int(page.page.locator(CANVAS).evaluate(count))


@pytest.fixture
def running(page: LabPage, lab: LabServer, request: pytest.FixtureRequest) -> Path:
    """A page whose second cell runs and shows a strip; the file that ends it."""
    name = request.node.name
    stop = watched(lab, name)
    page.open_notebook(f"{name}.ipynb")
    page.run_and_wait(0)
    page.run_cell(1)
    page.page.wait_for_selector(CANVAS)
    return stop


def test_strip_moves_while_the_cell_runs(page: LabPage, running: Path) -> None:
    segments = 0
    for second in (1, 2.5, 4):
        wait_until_later(page, second)
        page.wait_until(f"(count) => Number(document.querySelector('{CANVAS}').dataset.segments) > count", segments)
        assert page.is_running(1)
        segments = int(page.page.locator(CANVAS).get_attribute("data-segments") or 0)
        assert num_colored(page) > 1000
    wait_until_failed(page)
    waits = r"/waiting in all_reduce, line 4, \d\.\d+ s/"
    page.wait_until(f"() => [...document.querySelectorAll('{STATES}')].some((one) => {waits}.test(one.textContent))")
    keys = "[...document.querySelectorAll('.axon-strip-key')].filter((key) => !key.hidden).map((key) => key.innerText)"
    page.wait_until(f"(all) => {keys}.join() === all", "running,in a collective,there for 0.25 s or more,failed")
    page.wait_until(f"() => document.querySelector('{STRIP} [aria-live=polite]').textContent !== ''")
    running.touch()
    page.wait_done(1)


def test_strip_returns_after_reload_during_a_cell(page: LabPage, running: Path) -> None:
    wait_until_later(page, 3)
    page.save()
    before = int(page.page.locator(CANVAS).get_attribute("data-segments") or 0)
    reload_until_shown(page, CANVAS)  # of Python alone; what a cell for ranks lets through is in `magics/extension.py`
    page.wait_until(f"(count) => Number(document.querySelector('{CANVAS}').dataset.segments) > count", before)
    running.touch()
    page.page.locator(f"{STRIP} .axon-view-state", has_text="ended").wait_for()
    wait_until_failed(page)


def test_strip_responds_to_keys_and_pointer(page: LabPage, running: Path) -> None:
    wait_until_later(page, 2)
    canvas = page.page.locator(CANVAS)

    def view() -> tuple[float, float]:
        first, last = (canvas.get_attribute("data-view") or "").split(",")
        return float(first), float(last)

    def wait_view(condition: str) -> None:
        page.wait_until(
            f"() => {{ const {{ view, now }} = document.querySelector('{CANVAS}').dataset;"
            " const [from, to] = view.split(',').map(Number);"
            f" const all = Math.max(Number(now), 5); return {condition}; }}"
        )

    canvas.focus()
    while (before := view()[1] - view()[0]) >= 1.5:
        page.page.keyboard.press("+")
        wait_view(f"to - from < 0.75 * Math.max({before}, all)")
    wait_view("from > 0 && Math.abs(now - to) < 0.02")
    page.page.keyboard.press("ArrowLeft")
    wait_view("from > 0 && to < now - 0.1")
    held = view()
    wait_until_later(page, held[1] + 2)
    assert view() == held, "a view that was moved away from the end stays"
    page.page.keyboard.press("Home")
    wait_view("from === 0 && to >= 5")
    canvas.hover(position={"x": 2, "y": 34})
    tip = page.page.locator(".axon-strip-tip")
    tip.wait_for()
    assert tip.inner_text().startswith("rank 0 · running, line")
    box = canvas.bounding_box()
    assert box is not None
    page.page.mouse.down()
    page.page.mouse.move(box["x"] + box["width"] / 4, box["y"] + 34)
    page.page.mouse.up()
    wait_view("from < 0.05 * all && to - from < 0.4 * all")
    page.page.get_by_role("button", name="Show everything").click()
    wait_view("from === 0 && to >= 5")
    running.touch()
    page.wait_done(1)


def test_strip_follows_the_theme_and_the_width(page: LabPage, running: Path) -> None:
    wait_until_later(page, 1)
    grid = "(c) => getComputedStyle(c.closest('.axon-strip')).color"
    page.set_theme(dark=False)
    light = page.page.locator(CANVAS).evaluate(grid)
    page.set_theme(dark=True)
    page.wait_until(f"(light) => ({grid})(document.querySelector('{CANVAS}')) !== light", light)
    wide = page.page.locator(CANVAS).evaluate("(c) => c.width")
    page.page.set_viewport_size({"width": 900, "height": 700})
    page.wait_until(f"(wide) => document.querySelector('{CANVAS}').width < wide", wide)
    running.touch()
    page.wait_done(1)


def test_strip_of_a_lost_kernel_stops_and_reports_it(page: LabPage, running: Path) -> None:
    wait_until_later(page, 1)
    page.restart_kernel()
    page.page.locator(f"{STRIP} .axon-view-state", has_text="no messages from the kernel").wait_for()
