"""Drive a kernel of this environment through one path per promise, and print what became of each as JSON.

`scripts/platforms.py` runs it with the Python of a platform's environment; it needs only what is installed there:

    python scripts/platform_paths.py build/platforms/colab/work [OPTION OF ipykernel ...]
"""

from __future__ import annotations

import json
import queue
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
WIDGET = "application/vnd.jupyter.widget-view+json"
_TIMEOUT_S = 180.0
_COLORS = re.compile(r"\x1b\[[0-9;]*m")


class Failed(Exception):
    """A path did not hold."""


class Cell:
    """What a cell has shown."""

    def __init__(self) -> None:
        self.status = ""
        self.text = ""
        """All text: of streams, results and errors."""
        self.bundles: list[dict[str, Any]] = []
        """What was displayed, by MIME type."""

    def take(self, message: dict[str, Any]) -> None:
        """Add a message of the output channel."""
        kind, content = message["msg_type"], message["content"]
        if kind == "stream":
            self.text += content["text"]
        elif kind == "error":
            self.text += "\n" + _COLORS.sub("", "\n".join(content["traceback"])) + "\n"
        elif kind in ("display_data", "execute_result", "update_display_data"):
            data = content["data"]
            self.bundles.append(data)
            self.text += "\n" + _COLORS.sub("", str(data.get("text/plain", ""))) + "\n"

    @property
    def last_line(self) -> str:
        """Of what it has shown."""
        lines = [line.strip() for line in self.text.splitlines() if line.strip()]
        return lines[-1] if lines else "nothing was shown"


class Notebook:
    """A kernel of this environment, and a client of it."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.manager: Any = KernelManager()
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", *options]
        self.manager._kernel_spec = KernelSpec(argv=argv, display_name="platform", language="python")
        self.manager.start_kernel(cwd=str(folder))
        self.updated: set[str] = set()
        """Ids of the widgets that have sent something to their page."""
        self._connect()

    def _connect(self) -> None:
        self.client: Any = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def submit(self, code: str) -> str:
        """Send a cell."""
        return str(self.client.execute(code, store_history=True))

    def collect(self, request: str, timeout: float = _TIMEOUT_S) -> Cell:
        """Wait for the end of a cell."""
        cell, end, idle = Cell(), time.monotonic() + timeout, False
        while not (idle and cell.status):
            if time.monotonic() > end:
                raise Failed(f"a cell did not end in {timeout:.0f} s: {cell.last_line}")
            message = None if idle else _next(self.client.get_iopub_msg)
            if message is not None and message["msg_type"] == "comm_msg":
                self.updated.add(message["content"]["comm_id"])
            elif message is not None and message["parent_header"].get("msg_id") == request:
                cell.take(message)
                idle = message["content"].get("execution_state") == "idle"
            reply = _next(self.client.get_shell_msg) if idle else None
            if reply is not None and reply["parent_header"].get("msg_id") == request:
                cell.status = reply["content"]["status"]
        return cell

    def run(self, code: str) -> Cell:
        """Run a cell, whatever becomes of it."""
        cell = self.collect(self.submit(code))
        if cell.status == "aborted":  # ipykernel 6 drops what arrives right after a cell that failed
            time.sleep(0.5)
            cell = self.collect(self.submit(code))
        return cell

    def answer(self, code: str, *lines: str) -> Cell:
        """Run a cell, and answer each of its questions with a line."""
        request = str(self.client.execute(code, allow_stdin=True))
        for line in lines:
            try:
                self.client.get_stdin_msg(timeout=60)
            except queue.Empty:
                raise Failed(f"nothing asks for {line!r}") from None
            self.client.input(line)
        return self.collect(request)

    def ok(self, code: str, shows: str = "") -> Cell:
        """Run a cell that must succeed and show this."""
        cell = self.run(code)
        if cell.status != "ok":
            raise Failed(f"`{code.strip().splitlines()[-1]}`: {cell.last_line}")
        _require(shows in cell.text, f"{shows!r} is not shown", cell)
        return cell

    def fails(self, code: str, *shows: str) -> Cell:
        """Run a cell that must fail and show this."""
        cell = self.run(code)
        _require(cell.status == "error", "the cell did not fail", cell)
        for text in shows:
            _require(text in cell.text, f"{text!r} is not shown", cell)
        return cell

    def ask(self, request: str) -> dict[str, Any]:
        """The content of the reply to a request on the shell channel."""
        end = time.monotonic() + 20
        while time.monotonic() < end:
            reply = _next(self.client.get_shell_msg)
            if reply is not None and reply["parent_header"].get("msg_id") == request:
                return dict(reply["content"])
        raise Failed("no reply in 20 s")

    def show(self, widget: str) -> None:
        """Tell a widget that a page shows it, as its page does every few seconds."""
        content = {"comm_id": widget, "data": {"method": "custom", "content": {"op": "heartbeat"}}}
        self.client.shell_channel.send(self.client.session.msg("comm_msg", content))

    def restart(self) -> None:
        """Restart the kernel as its menu does."""
        self.client.stop_channels()
        self.manager.restart_kernel(now=False)
        self._connect()

    def close(self) -> None:
        """End the kernel."""
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=False)


def _next(channel: Any) -> dict[str, Any] | None:
    try:
        return dict(channel(timeout=0.2))
    except queue.Empty:
        return None


def _require(holds: bool, otherwise: str, cell: Cell) -> None:
    if not holds:
        raise Failed(f"{otherwise}; last: {cell.last_line}")


SUM = "%%distributed\ntotal = torch.tensor([rank + 1.0])\ndist.all_reduce(total)\nprint('sum', total.item())"


def load(book: Notebook) -> None:
    """`%load_ext axon_nb`, and nothing but that."""
    cell = book.ok("%load_ext axon_nb")
    _require("Traceback" not in cell.text, "a traceback", cell)


FEWER = {
    "start -n 4": "start -n 2",
    "range(12)": "range(8)",
    "(12, -1)": "(8, -1)",
    "range(1, 13)": "range(1, 9)",
    "accuracy > 0.95": "accuracy > 0.8",
}
"""What the first notebook has on four ranks, and here: fewer ranks and epochs."""


def quickstart(book: Notebook) -> None:
    """The cells of the first notebook on two ranks, up to those that need four."""
    text = (EXAMPLES / "01_quickstart.py").read_text(encoding="utf-8").split("# ## Some ranks only")[0]
    for old, new in FEWER.items():
        text = text.replace(old, new)
    for block in re.split(r"^# %%(?= |$).*\n", text, flags=re.MULTILINE)[1:]:
        code = re.sub(r"^# (%.*)", r"\1", block, flags=re.MULTILINE).strip()
        if not all(line.startswith("#") for line in code.splitlines()):
            book.ok(code)


def failing_rank(book: Notebook) -> None:
    """One rank raises while the other waits for it; the next cell runs."""
    code = "%%distributed\nscales = [1.0]\npart = torch.ones(8) * scales[rank]\ndist.all_reduce(part)"
    book.fails(code, "IndexError", "[rank 1]", "waited in all_reduce at line 4", "----> 3")
    book.ok(SUM, "sum 3.0")


def interrupt(book: Notebook) -> None:
    """The stop button ends a cell that waits on its ranks; the next cell runs."""
    request = book.submit("%%distributed\nimport time\nkept = 7\nfor _ in range(600): time.sleep(0.1)")
    time.sleep(3)
    book.manager.interrupt_kernel()
    began = time.monotonic()
    cell = book.collect(request, timeout=60)
    _require(cell.status == "error" and "KeyboardInterrupt" in cell.text, "no KeyboardInterrupt", cell)
    _require(time.monotonic() - began < 10, "it took over 10 s", cell)
    book.ok(SUM.replace("'sum'", "'sum', kept"), "sum 7 3.0")


def repair(book: Notebook) -> None:
    """A killed rank is named and replaced; the other keeps its variables."""
    kill = "import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()"
    book.fails(f"%%distributed\n{kill}", "SIGKILL")
    book.ok("%distributed repair")
    book.ok(SUM, "sum 3.0")
    book.ok("%%rank 0\nprint('kept', kept)", "kept 7")


def attach(book: Notebook) -> None:
    """The ranks survive a restart of the kernel, with their variables."""
    book.restart()
    book.ok("%load_ext axon_nb", "is still running")
    book.ok("%distributed attach")
    book.ok("%%rank 0\nprint('kept', kept)", "kept 7")
    book.ok(SUM, "sum 3.0")


def async_cells(book: Notebook) -> None:
    """Cells that do not hold the notebook: awaited, cancelled by their task, and in the background."""
    book.ok("import asyncio, axon_nb\ncluster = axon_nb.current_cluster()")
    book.ok("print((await cluster.run_async('rank * 2')).values)", "{0: 0, 1: 2}")
    sleeping = "cluster.run_async('import time; time.sleep(600)')"
    book.ok(f"task = asyncio.ensure_future({sleeping})\nawait asyncio.sleep(1)\ntask.cancel()")
    book.ok("try: await task\nexcept asyncio.CancelledError: print('cancelled')", "cancelled")
    book.ok("%%distributed --noblock --out handle\nimport time\ntime.sleep(600)")
    book.ok("%distributed cancel", "Interrupted the cell on ranks 0-1.")
    book.fails("handle.result(60)", "Ranks 0-1 stopped")
    book.ok(SUM, "sum 3.0")


def debugger(book: Notebook) -> None:
    """A failed rank, and ranks at a breakpoint, answer pdb's commands."""
    book.fails("%%distributed\ndef half(x):\n    return x / 0\nhalf(rank)", "ZeroDivisionError")
    _require("'x=1'" in (cell := book.answer("%distributed debug --ranks 1", "p f'x={x}'", "q")).text, "no x", cell)
    cell = book.answer("%%distributed --debug\nx = rank + 5\nprint('went on', x)", "n", "all p x", "c")
    for text in ("[rank 1] 6", "[rank 1] went on 6"):
        _require(text in cell.text, f"{text!r} is not shown", cell)


def transfer(book: Notebook) -> None:
    """`%push` and `%pull`, also of a frame."""
    book.ok("import numpy as np, pandas as pd\nsent, frame = np.arange(6.0), pd.DataFrame({'a': [1, 2]})")
    book.ok("%push sent frame")
    book.ok("%%distributed\nback = sent.sum() + rank\nwide = frame.assign(b=rank)")
    book.ok("%pull back wide\nprint(back, wide[1].b.tolist())", "[1, 1]")


def completion(book: Notebook) -> None:
    """Tab and Shift+Tab ask a rank."""
    book.ok("%%distributed\nimport collections\nonly_on_ranks = collections.OrderedDict(a=1)")
    code = "%%distributed\nonly_on_ra"
    end, found = time.monotonic() + 60, dict[str, Any]()  # a first answer may be late on a busy machine
    while "only_on_ranks" not in str(found.get("matches")) and time.monotonic() < end:
        found = book.ask(book.client.complete(code, len(code)))
    if "only_on_ranks" not in found.get("matches", []):
        raise Failed(f"Tab offers {found.get('matches')}")
    code = "%distributed ex"
    found = book.ask(book.client.complete(code, len(code)))
    if "export" not in found.get("matches", []):
        raise Failed(f"Tab after %distributed offers {found.get('matches')}")
    code = "%%distributed\nonly_on_ranks"
    found = book.ask(book.client.inspect(code, len(code)))
    if "OrderedDict" not in str(found.get("data")):
        raise Failed("Shift+Tab finds nothing")
    own = book.ask(book.client.inspect("print", 5))
    if missing := own["data"].keys() - found["data"].keys():
        raise Failed(f"Shift+Tab lacks the notebook's own {', '.join(missing)}")


def during_cell(book: Notebook) -> None:
    """Tab is answered while a cell waits for its ranks."""
    request = book.submit("%%distributed\nimport time\ntime.sleep(6)")
    time.sleep(2)
    began = time.monotonic()
    found: dict[str, Any] = book.ask(book.client.complete("%%distributed\nonly_on_ra", 24))
    took = time.monotonic() - began
    book.collect_rest(request) if hasattr(book, "collect_rest") else book.ok("1 + 1")
    if took > 2 or "only_on_ranks" not in found.get("matches", []):
        raise Failed(f"Tab waited {took:.0f} s for the cell")


def views(book: Notebook) -> None:
    """Each of the four views is saved as a picture, and live: a page that shows it gets what a cell changes."""
    step = "for _ in range(3):\n    t = torch.ones(4)\n    dist.all_reduce(t)"
    book.ok(f"%%distributed\nmodel = torch.nn.Linear(8, 8)\n{step}")
    missing, widgets = [], dict[str, str]()
    for line in ("%timeline", "%watch", "%shards model", "%memory model"):
        shown = {kind: data for bundle in book.ok(line).bundles for kind, data in bundle.items()}
        if "text/html" not in shown:
            missing.append(f"{line}: no picture")
        if WIDGET in shown:
            widgets[line] = shown[WIDGET]["model_id"]
        else:
            missing.append(f"{line}: no widget")
    for widget in widgets.values():
        book.show(widget)
    book.updated.clear()
    book.ok(f"%%distributed\nimport time\n{step}\nmodel = torch.nn.Linear(16, 16)\ntime.sleep(2)")
    book.ok("import time; time.sleep(2)")
    missing += [f"{line}: not live" for line, widget in widgets.items() if widget not in book.updated]
    if missing:
        raise Failed(", ".join(missing))


def export(book: Notebook) -> None:
    """The cells that ran are written as a script."""
    book.ok("%distributed export script.py")
    book.ok("text = open('script.py').read()\ncompile(text, 'script.py', 'exec')")
    book.ok("print('complete', 'all_reduce' in text)", "complete True")


def stop(book: Notebook) -> None:
    """No rank is left."""
    book.ok("%distributed stop")


PATHS: dict[str, Callable[[Notebook], None]] = {
    "`%load_ext`": load,
    "quickstart on 2 ranks": quickstart,
    "a failing rank": failing_rank,
    "interrupt": interrupt,
    "killed rank, repair": repair,
    "restart, attach": attach,
    "cells that do not block": async_cells,
    "debugger": debugger,
    "push, pull": transfer,
    "Tab, Shift+Tab": completion,
    "Tab during a cell": during_cell,
    "views, saved and live": views,
    "export": export,
    "stop": stop,
}


def main(argv: list[str] | None = None) -> int:
    """Walk all paths and print, by path, why it did not hold: empty if it did."""
    place, *options = argv or sys.argv[1:]
    folder = Path(place).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "data").mkdir(parents=True)
    shutil.copy(EXAMPLES / "data" / "digits.csv.gz", folder / "data")
    book, outcomes = Notebook(folder, *options), dict[str, str]()
    try:
        for name, path in PATHS.items():
            began = time.monotonic()
            try:
                path(book)
                outcomes[name] = ""
            except Failed as why:
                outcomes[name] = str(why)
            except Exception as error:
                outcomes[name] = f"{type(error).__name__}: {error}"
            took = time.monotonic() - began
            print(f"   {name}: {outcomes[name] or 'ok'} ({took:.1f} s)", file=sys.stderr, flush=True)
            if name == "`%load_ext`" and outcomes[name]:
                break
    finally:
        book.close()
    print(json.dumps(outcomes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
