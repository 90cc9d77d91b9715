"""Overhead of live views: a training step with all views open against none, and traffic to a page: `make bench`.

Run `python -m benchmarks.views [--quick]` in the project's folder on an idle machine. Step times are measured
without a browser, which would compete for cores: a thread in the kernel sends the messages that a page would send.
"""

from __future__ import annotations

import argparse
import ast
import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import nbformat

from axon_nb.cluster.inspection.spans import SpanStore
from axon_nb.records.spans import Span
from axon_nb.widgets.cell.activity import RankHistory, strip_bundle
from axon_nb.widgets.html import foldable
from axon_nb.widgets.timeline.page import timeline_bundle
from benchmarks.pairs import PairedRow
from benchmarks.report import Row, write
from benchmarks.views_page import page_rows
from tests.browser.bare.view_pages import SAMPLES, page_html
from tests.browser.conftest import CHROMIUM_NAMES, CHROMIUM_OPTIONS
from tests.support.kernel import Kernel
from tests.support.records.saved_views import VIEWS

ROOT = Path(__file__).parents[1]
STEP, UPDATE_BYTES = 1.02, 50_000

MODEL = f"""%%distributed
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from benchmarks import workloads
import axon_nb
model = torch.nn.parallel.DistributedDataParallel(workloads.transformer())
optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
tokens = torch.randint(512, (4, 64), generator=torch.Generator().manual_seed(rank))
def block(steps, on):
    if not on:
        from axon_nb.engine.kernel.control import VIEWS
        from axon_nb.engine.session import current
        current().part(VIEWS)._spans._steps.watch(0)  # stop at once; ranks would notice only after 5 s
    dist.barrier()
    began = time.perf_counter()
    for _ in axon_nb.progress(range(steps), desc="steps"):
        optimizer.zero_grad()
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        axon_nb.log(loss=loss.detach(), items=4)
    dist.barrier()
    return (time.perf_counter() - began) / steps
_ = block(4, False)"""

PAGE = """
import json, threading, time
from axon_nb.cluster.session import current

def views():
    found = [panel.view for panel in list(current.session().panels.values())]
    spans = current.get().spans._views if current.get() is not None else ()
    return found + [view for view in list(spans) if view not in found]  # that of --watch is among them

class Page:
    '''Sends what a page that shows all views would send, and counts what it receives (not while steps are timed).'''

    def __init__(self, session):
        self.on, self.counts, self.sizes, self._send = False, True, [], session.send
        session.send = self.send
        threading.Thread(target=self.say, daemon=True).start()

    def send(self, stream, kind, *args, **kwargs):
        if kind == "comm_msg" and (self.counts or not self.on):
            content = args[0] if args else kwargs.get("content")
            buffers = kwargs.get("buffers") or ()
            self.sizes.append(len(json.dumps(content, default=str)) + sum(memoryview(b).nbytes for b in buffers))
        return self._send(stream, kind, *args, **kwargs)

    def say(self):
        '''As a page does: a heartbeat every four seconds, and an acknowledgement of each message.'''
        said = {}
        while True:
            time.sleep(0.2)
            now = time.monotonic()
            try:
                shown = views() if self.on else []
            except RuntimeError:  # one is being opened
                continue
            for view in shown:
                if now - said.get(view, 0.0) > 4:
                    said[view] = now
                    view._handle_custom_msg({"op": "heartbeat"}, [])
                if getattr(view, "_last_sent", 0) > getattr(view, "_last_acked", 0):
                    view._handle_custom_msg({"op": "ack"}, [])
            said = said if self.on else {}

    def close(self):
        self.on = False
        for panel in list(current.session().panels.values()):
            panel.close()
            panel.view.close()
        current.session().panels.clear()
        self.sizes.clear()

page = Page(get_ipython().kernel.session)
"""

OPEN = "page.on = True\nget_ipython().run_line_magic('timeline', '')\nget_ipython().run_line_magic('watch', '')\n"
OPEN += "get_ipython().run_line_magic('memory', 'model optimizer')\nget_ipython().run_line_magic('shards', 'model')"


def _block(kernel: Kernel, steps: int, *, on: bool) -> float:
    """Seconds per step, in a cell with `steps` steps."""
    kernel.ok(OPEN if on else "page.close()", timeout=60)
    head = "%%distributed --watch" if on else "%%distributed"
    kernel.ok(f"{head} --quiet --out measured\nblock({steps}, {on})", timeout=600)
    return float(ast.literal_eval(kernel.ok("measured.values[0]").result))


def cost(kernel: Kernel, *, pairs: int, steps: int) -> list[Row]:
    """Step time with all views on and off, alternating; size of updates; traffic when no view is visible."""
    measured, sizes, silent = [], list[int](), 0
    for on in (False, True):
        _block(kernel, steps, on=on)
    sizes += json.loads(kernel.value("json.dumps(page.sizes)"))
    kernel.ok("page.counts = False")
    for number in range(pairs):
        seconds = {}
        for on in (True, False) if number % 2 else (False, True):
            seconds[on] = _block(kernel, steps, on=on)
            if not on:
                silent += int(kernel.value("len(page.sizes)"))
        measured.append((seconds[True], seconds[False]))
    row = PairedRow.of_ratios("training step with %timeline, %watch, %memory, %shards, --watch", measured, STEP)
    return [
        replace(row, peer="nothing open"),
        Row("largest update of a view", max(sizes) / 1e3, "kB", limit=UPDATE_BYTES / 1e3, note=f"{len(sizes)} updates"),
        Row("messages of views while none is open", silent, "messages", limit=0),
    ]


_FRAMES = ("DrawFrame", "Commit")
"""What Chromium calls a frame in its trace: one that is shown, or, without a screen, one that is handed over."""
WATCHED = """%%distributed --quiet
import axon_nb, time
end = time.monotonic() + {seconds}
while time.monotonic() < end:
    axon_nb.log(loss=1.0, items=4)
    time.sleep(0.01)"""


def watch_cost(*, seconds: float) -> list[Row]:
    """CPU time of the notebook's kernel while `%watch` follows 4 ranks at about 100 steps per second."""
    with Kernel() as kernel:
        kernel.ok(
            "%load_ext axon_nb\n%distributed config threads=1\n%distributed start -n 4 --devices cpu", timeout=120
        )
        kernel.ok(PAGE)
        shares = {}
        for on in (False, True, False, True):
            kernel.ok("page.on = True\n%watch" if on else "page.close()")
            kernel.ok("import time\nbegan = time.process_time(), time.monotonic()")
            kernel.ok(WATCHED.format(seconds=seconds), timeout=300)
            used = "(time.process_time() - began[0]) / (time.monotonic() - began[1])"
            shares[on] = min(shares.get(on, 1.0), float(kernel.value(used)))
        kernel.ok("page.close()\n%distributed stop")
    note = f"kernel: {100 * shares[True]:.2f} % with it, {100 * shares[False]:.2f} % without"
    return [
        Row(
            "%watch of 4 ranks at 100 steps/s",
            100 * (shares[True] - shares[False]),
            "% of a core",
            limit=2.0,
            note=note,
        )
    ]


def saved_size() -> list[Row]:
    """Size of a notebook with the pictures of all five views, of a cell with 2,000 spans."""
    spans = [
        Span(rank, kind, f"layer{i % 12}", (i * 4 + k) * 1_000_000, (i * 4 + k + 1) * 1_000_000 - rank * 20_000)
        for rank in range(4)
        for i in range(125)
        for k, kind in enumerate(("forward", "collective", "backward", "optimizer"))
    ]
    store = SpanStore()
    store.add(spans)
    bundles = [make() for name, make in VIEWS.items() if name != "timeline"]
    bundles += [timeline_bundle(store.table(), range(4), title="In [5]")] * 2  # %timeline, and that of --watch
    bundles += [strip_bundle([RankHistory(rank) for rank in range(4)], title="In [5]", end=2.0, lost=0)]
    notebook = nbformat.v4.new_notebook()
    for bundle in bundles:
        folded = {**bundle, "text/html": foldable(bundle["text/html"])}
        notebook.cells.append(nbformat.v4.new_code_cell(outputs=[nbformat.v4.new_output("display_data", folded)]))
    size = len(nbformat.writes(notebook)) / 1e3
    return [Row("saved notebook with all five views of a cell with 2,000 spans", size, "kB", limit=400)]


def scrolling(*, seconds: float) -> list[Row]:
    """Time per frame of Chromium, by its trace, while a page with three views that update is scrolled."""
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, CHROMIUM_NAMES)))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        for name in ("watch", "memory", "timeline"):
            html = page_html(name, SAMPLES[name][1](4))
            update = "<script>setInterval(() => Object.values(handlers).forEach((handle) => handle()), 1000)</script>"
            (Path(folder) / f"{name}.html").write_text(html.replace("</body>", f"{update}</body>"), encoding="utf-8")
        frames = "".join(
            f'<iframe src="{name}.html" style="width:100%;height:1100px;border:none"></iframe>'
            for name in ("watch", "memory", "timeline")
        )
        (Path(folder) / "all.html").write_text(frames, encoding="utf-8")
        browser = playwright.chromium.launch(executable_path=path, args=CHROMIUM_OPTIONS)
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto((Path(folder) / "all.html").as_uri())
        page.wait_for_timeout(2000)
        page.mouse.move(640, 450)
        browser.start_tracing(
            page=page, categories=["devtools.timeline.frame", "disabled-by-default-devtools.timeline"]
        )
        steps = round(seconds * 60)
        for step in range(steps):
            page.mouse.wheel(0, 40 if step % 120 < 60 else -40)
            page.wait_for_timeout(10)
        events = json.loads(browser.stop_tracing())["traceEvents"]
        browser.close()
    drawn = sorted(event["ts"] for event in events if event["name"] in _FRAMES)
    took = (drawn[-1] - drawn[0]) / 1e3 / (len(drawn) - 1)
    note = f"{1e3 / took:.0f} frames per second"
    return [Row("scrolling a page with three live views", took, "ms per frame", limit=20, note=note)]


def main() -> None:
    """Measure on 2 ranks with 1 thread each, then in JupyterLab; print the table and write it to benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few pairs, as a smoke test")
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--no-page", action="store_true", help="skip the measurements in JupyterLab")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    pairs, steps = (3, 4) if options.quick else (options.pairs, 40)
    with Kernel() as kernel:
        kernel.ok(
            "%load_ext axon_nb\n%distributed config threads=1\n%distributed start -n 2 --devices cpu", timeout=120
        )
        kernel.ok(MODEL, timeout=120)
        kernel.ok(PAGE)
        rows = cost(kernel, pairs=pairs, steps=steps)
        kernel.ok("page.close()\n%distributed stop")
    rows += [*watch_cost(seconds=4.0 if options.quick else 20.0), *saved_size()]
    if not options.no_page:
        rows += scrolling(seconds=4.0 if options.quick else 10.0)
        rows += page_rows(seconds=4.0 if options.quick else 20.0)
    print(write("views", rows, options.out))


if __name__ == "__main__":
    main()
