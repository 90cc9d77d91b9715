"""The notebook's sink in a real IPython kernel: the messages that a front end gets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kernel import Kernel, Reply

SETUP = """
import time
from IPython import get_ipython
from axon_nb.cluster.output import CellOutput, NotebookSink

def feed(output, rank, text, name="stdout"):
    output.feed(rank, "stream", {"name": name, "text": text}, {})

def step(output, seconds):
    end = time.monotonic() + seconds
    while (due := output.next_due()) is not None and due <= end:
        time.sleep(max(0.0, due - time.monotonic()))
        output.flush()
    time.sleep(max(0.0, end - time.monotonic()))
"""

LINES = """
output = CellOutput(range(4), NotebookSink())
for rank in range(4):
    feed(output, rank, "hello\\n")
    feed(output, rank, f"I am {rank}\\n", "stderr")
    output.feed(rank, "execute_result", {"data": {"text/plain": "42"}, "metadata": {}, "execution_count": 1}, {})
    output.feed(rank, "display_data", {"data": {"text/plain": "x", "text/html": "<b>x</b>"}, "metadata": {}}, {})
output.flush(final=True)
"""

BARS = """
import io
from tqdm import tqdm

output, text = CellOutput([0, 1], NotebookSink()), io.StringIO()
feed(output, 0, "before\\n")
sent = 0
for i in tqdm(range(6), file=text, mininterval=0, ncols=60, desc="steps"):
    if i == 3:
        tqdm.write("between", file=text)
    for rank in (0, 1):
        feed(output, rank, text.getvalue()[sent:], "stderr")
    sent = len(text.getvalue())
    step(output, 0.12)
for rank in (0, 1):
    feed(output, rank, text.getvalue()[sent:], "stderr")
    feed(output, rank, "after\\n")
    output.rank_done(rank)
step(output, 0.05)
output.flush(final=True)
"""

UPDATES = """
output = CellOutput([0, 1], NotebookSink())
def show(rank, kind, html):
    content = {"data": {"text/html": html}, "metadata": {"text/html": {"a": 1}}, "transient": {"display_id": "plot"}}
    output.feed(rank, kind, content, {})
for rank in (0, 1):
    show(rank, "display_data", f"first {rank}")
output.flush(final=True)
for rank in (1, 0):
    show(rank, "update_display_data", f"second {rank}")
output.flush(final=True)
"""

CAPTURED = """
%%capture captured
output = CellOutput([0], NotebookSink())
feed(output, 0, "caught\\n")
output.feed(0, "display_data", {"data": {"text/html": "<b>x</b>"}, "metadata": {}}, {})
output.flush(final=True)
"""


@pytest.fixture(scope="module")
def notebook() -> Iterator[Kernel]:
    """A kernel without a cluster."""
    with Kernel() as kernel:
        kernel.ok(SETUP)
        yield kernel


def kinds(reply: Reply) -> list[str]:
    return [kind for _, kind, _ in reply.arrivals if kind not in ("status", "execute_input")]


def test_lines_results_and_displays(notebook: Kernel) -> None:
    reply = notebook.ok(LINES)
    assert reply.lines() == ["[ranks 0-3] hello", "[ranks 0-3] 42", "[ranks 0-3]"]
    assert reply.stderr.splitlines() == [f"[rank {rank}] I am {rank}" for rank in range(4)]
    assert reply.displays == [{"text/plain": "x", "text/html": "<b>x</b>"}]
    assert kinds(reply) == ["stream", "stream", "stream", "display_data"]


def test_bar_is_one_display_between_lines(notebook: Kernel) -> None:
    reply = notebook.ok(BARS)
    assert reply.lines() == ["[rank 0] before", "[ranks 0-1] after"]
    assert reply.stderr.splitlines() == ["[ranks 0-1] between"]
    (bar,) = reply.displays
    assert list(bar) == ["text/plain"]
    assert bar["text/plain"].startswith("[ranks 0-1] steps: 100%|")
    assert "\n" not in bar["text/plain"]
    assert kinds(reply)[:2] == ["stream", "display_data"]
    assert 3 <= kinds(reply).count("update_display_data") <= 9


def test_updates_reach_their_ranks_display(notebook: Kernel) -> None:
    reply = notebook.ok(UPDATES)
    assert [display["text/html"] for display in reply.displays] == ["second 0", "second 1"]


def test_capture_takes_the_output(notebook: Kernel) -> None:
    assert kinds(notebook.ok(CAPTURED.strip())) == []
    assert notebook.value("captured.stdout") == "[rank 0] caught\n[rank 0]\n"
    assert notebook.value("len(captured.outputs)") == 1
