"""Overhead of live views: a training step with all views open against none, and traffic to a page: `make bench`.

Run `python -m benchmarks.views [--quick]` in the project's folder on an idle machine. Step times are measured
without a browser, which would compete for cores: a thread in the kernel sends the messages that a page would send.
"""

from __future__ import annotations

import argparse
import ast
import json
from dataclasses import replace
from pathlib import Path

from benchmarks.pairs import PairedRow
from benchmarks.report import Row, write
from benchmarks.views_page import page_rows
from tests.support.kernel import Kernel

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
    if not options.no_page:
        rows += page_rows(seconds=4.0 if options.quick else 20.0)
    print(write("views", rows, options.out))


if __name__ == "__main__":
    main()
