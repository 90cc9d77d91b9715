"""Where output goes when there is no notebook: a plain script prints, and nothing of IPython is loaded for it."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

from axon_nb.cluster.output import CellOutput, NotebookSink

SCRIPT = """
import sys
from axon_nb.cluster.output import CellOutput, NotebookSink
output = CellOutput([0, 1], NotebookSink())
for rank in (0, 1):
    output.feed(rank, "stream", {"name": "stdout", "text": "hello\\n"}, {})
    output.feed(rank, "stream", {"name": "stderr", "text": "\\r1/2\\r2/2\\n"}, {})
    output.feed(rank, "execute_result", {"data": {"text/plain": "42"}, "metadata": {}}, {})
    shown = {"data": {"text/plain": "Figure", "text/html": "<b>x</b>"}, "transient": {"display_id": "f"}}
    output.feed(rank, "display_data", shown, {})
    output.feed(rank, "update_display_data", shown, {})
    output.feed(rank, "clear_output", {"wait": True}, {})
    output.feed(rank, "stream", {"name": "stdout", "text": "snow\\u2603\\n"}, {})
output.flush(final=True)
unwanted = {"IPython", "ipykernel", "ipyparallel", "torch", "ipywidgets"} & set(sys.modules)
assert not unwanted, unwanted
"""


@pytest.mark.parametrize(("encoding", "snow"), [("utf-8", "snow\u2603"), ("ascii", "snow\\u2603")])
def test_plain_script_prints(encoding: str, snow: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-X", "utf8=0", "-c", SCRIPT],
        env={"PYTHONPATH": ":".join(sys.path), "PYTHONIOENCODING": encoding, "PATH": ""},
        capture_output=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stderr.decode() == "[ranks 0-1] 2/2\n"
    assert done.stdout.decode(encoding).splitlines() == [
        "[ranks 0-1] hello",
        "[ranks 0-1] 42",
        *("[ranks 0-1]", "Figure"),
        f"[ranks 0-1] {snow}",
        *("[ranks 0-1]", "Figure"),
    ]


def test_output_follows_redirected_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    output = CellOutput([0], NotebookSink())
    output.feed(0, "stream", {"name": "stdout", "text": "caught\n"}, {})
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", caught := io.StringIO())
        output.flush(final=True)
    assert caught.getvalue() == "[rank 0] caught\n"
