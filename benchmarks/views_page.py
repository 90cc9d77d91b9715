"""A timeline of 100,000 spans in JupyterLab in headless Chromium: updates per second, and their cost."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

from benchmarks.report import Row
from tests.browser.conftest import CHROMIUM_NAMES, CHROMIUM_OPTIONS, WINDOW
from tests.support.browser.lab_page import LabPage
from tests.support.browser.lab_server import LabServer

CANVAS = ".axon-timeline-canvas"
SPANS = 100_000
UPDATE_MS, RELOAD_S, GROWTH_MB = 100.0, 4.0, 30.0

START = """%load_ext axon_nb
%distributed config threads=1
%distributed start -n 2 --devices cpu"""
EMIT = f"""%%distributed
import time
from pathlib import Path
from axon_nb.records.spans import Span
from axon_nb.records.spans import emit
kinds = (("forward", "GPT"), ("backward", "backward"), ("collective", "all_reduce"), ("optimizer", "AdamW"))
def some(count):
    for i in range(count):
        kind, name = kinds[i % 4]
        now = time.monotonic_ns()
        emit(Span(rank, kind, name, now - 150_000, now, "0" if kind == "collective" else "", i))
print("filling", flush=True)
for _ in range({SPANS} // 2 // 500 + 1):
    some(500)
    time.sleep(0.05)
print("filled", flush=True)
end = time.monotonic() + 300
while not Path(STOP).exists() and time.monotonic() < end:
    some(100)
    time.sleep(0.02)"""


def page_rows(*, seconds: float) -> list[Row]:
    """Measure while ranks add 10,000 spans per second: for `seconds`, then across a page reload."""
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)
    if path is None:
        print(f"Skipped: no browser found (one of {', '.join(CHROMIUM_NAMES)}).")
        return []
    with tempfile.TemporaryDirectory() as folder, LabServer(Path(folder) / "server") as lab, sync_playwright() as api:
        browser = api.chromium.launch(executable_path=path, args=CHROMIUM_OPTIONS)
        page = LabPage(browser.new_context(viewport=WINDOW, device_scale_factor=1).new_page(), lab)
        try:
            return _measure(page, lab, seconds)
        finally:
            browser.close()


def _measure(page: LabPage, lab: LabServer, seconds: float) -> list[Row]:
    stop = lab.notebooks / "stop"
    lab.write_notebook("views.ipynb", [START, "%timeline", EMIT.replace("STOP", repr(str(stop))), "%distributed stop"])
    page.open_notebook("views.ipynb")
    page.run_and_wait(0, limit=120)
    page.run_and_wait(1)
    page.page.wait_for_selector(CANVAS)
    page.run_cell(2)
    page.wait_text(2, "filled", limit=120)
    page.page.wait_for_function(
        f"() => Number(document.querySelector('{CANVAS}').dataset.spans) >= {SPANS}", timeout=120_000
    )
    page.page.locator(CANVAS).press("a")  # everything is drawn
    page.page.wait_for_function(f"() => Number(document.querySelector('{CANVAS}').dataset.found) >= {SPANS}")
    meter = _Meter(page)
    heap = meter.heap_mb()
    before, began, busy = _updates(page), time.monotonic(), meter.busy_s()
    page.page.wait_for_timeout(seconds * 1000)
    count, passed = _updates(page) - before, time.monotonic() - began
    busy = meter.busy_s() - busy
    growth = meter.heap_mb() - heap
    page.save()
    began = time.monotonic()
    page.page.reload()
    page.page.wait_for_function(
        f"() => Number(document.querySelector('{CANVAS}')?.dataset.updates) > 1", timeout=120_000
    )
    again = time.monotonic() - began
    stop.touch()
    page.run_and_wait(3, limit=120)
    return [
        Row(
            "timeline of 100,000 spans, time from one appended update to the next", 1e3 * passed / max(1, count), "ms",
            limit=UPDATE_MS, note=f"{count / passed:.1f} updates per second, all spans drawn at each; "
            f"{1e3 * busy / max(1, count):.0f} ms of the page's main thread for an update",
        ),
        Row(
            "the same, growth of the page's memory", growth, "MB", limit=GROWTH_MB,
            note=f"after {passed:.0f} s of 10,000 more spans per second",
        ),
        Row("the same, from a reload of JupyterLab to the view that is live again", again, "s", limit=RELOAD_S),
    ]  # fmt: skip


def _updates(page: LabPage) -> int:
    return int(page.page.locator(CANVAS).get_attribute("data-updates") or 0)


class _Meter:
    """Reads a page's CPU time and memory from the browser."""

    def __init__(self, page: LabPage) -> None:
        self._session = page.page.context.new_cdp_session(page.page)
        self._session.send("Performance.enable")

    def busy_s(self) -> float:
        """CPU seconds of the page's main thread so far."""
        found = {metric["name"]: metric["value"] for metric in self._session.send("Performance.getMetrics")["metrics"]}
        return float(found["TaskDuration"])

    def heap_mb(self) -> float:
        """Memory of the page's scripts, including arrays, after garbage collection."""
        self._session.send("HeapProfiler.collectGarbage")
        found = self._session.send("Runtime.getHeapUsage")
        return float(found["usedSize"] + found.get("backingStorageSize", 0)) / 1e6
