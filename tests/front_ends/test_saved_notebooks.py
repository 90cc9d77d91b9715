"""What other programs make of notebooks whose cells ran on ranks: Sphinx of one with a failure, and ploomber-engine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from scripts.generated_page import ROOT
from tests.support.browser.lab_server import PYTHON_3

pytestmark = pytest.mark.slow
START = "%load_ext axon_nb\n%distributed start -n 2"


def _notebook(*cells: str) -> Any:
    made = [nbformat.v4.new_code_cell(source, id=f"cell-{i}") for i, source in enumerate(cells)]
    return nbformat.v4.new_notebook(metadata=PYTHON_3, cells=made)


@pytest.mark.filterwarnings("ignore")  # nbclient's, of its transport
def test_sphinx_builds_a_saved_failure_with_the_setting_that_the_docs_name(tmp_path: Path) -> None:
    notebook = _notebook(START, "%%distributed\nif rank:\n    1 / 0\ndist.barrier()", "%distributed stop")
    notebook.cells.insert(0, nbformat.v4.new_markdown_cell("# A page", id="head"))
    NotebookClient(notebook, kernel_name="python3", allow_errors=True).execute()
    (source := tmp_path / "source").mkdir()
    nbformat.write(notebook, source / "index.ipynb")
    page = (ROOT / "docs" / "howto" / "programs.md").read_text(encoding="utf-8")
    (setting,) = re.findall(r"`(suppress_warnings = \[.*?\])`", page)
    results = {}
    for lines in ("", setting):
        (source / "conf.py").write_text(f"extensions = ['myst_nb']\nnb_execution_mode = 'off'\n{lines}\n")
        command = [sys.executable, "-m", "sphinx", "-q", "-W", "-E", "-b", "html", str(source), str(tmp_path / "out")]
        results[lines] = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "unknown output mime type" in results[""].stderr, "else the docs need not name it"
    assert results[setting].returncode == 0, results[setting].stderr
    assert "ZeroDivisionError" in (tmp_path / "out" / "index.html").read_text(encoding="utf-8")


def test_figures_of_ranks_under_ploomber_engine(tmp_path: Path) -> None:
    pytest.importorskip("ploomber_engine", reason="needs ploomber-engine: pip install ploomber-engine")
    plot = "%%distributed\nimport matplotlib.pyplot as plt\nplt.plot([1, 2 + rank])\nplt.show()\nprint('after', rank)"
    updates = "%%distributed\nh = display('start', display_id='a')\nfor i in range(100):\n    h.update(i)"
    nbformat.write(_notebook(START, plot, updates, "%distributed stop"), tmp_path / "in.ipynb")
    program = "import ploomber_engine as p; p.execute_notebook('in.ipynb', output_path='out.ipynb')"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shown = [cell.outputs for cell in nbformat.read(tmp_path / "out.ipynb", as_version=4).cells]
    assert ["image/png" in output.data for output in shown[1] if output.output_type == "display_data"] == [True, True]
    text = "".join(output.text for output in shown[1] if output.output_type == "stream")
    assert {"[rank 0] after 0", "[rank 1] after 1"} <= set(text.splitlines())
    assert shown[2][0].text.splitlines()[-1] == "[ranks 0-1] 99"


LATE = """%%distributed
import asyncio, threading, time
bars = [display("begun", display_id=f"{kind} {rank}") for kind in ("task", "thread")]
def finish(bar, kind):
    print("from the", kind)
    bar.update(f"done by the {kind}")
async def work():
    await asyncio.sleep(0.5)
    finish(bars[0], "task")
def work_in_thread():
    time.sleep(0.5)
    finish(bars[1], "thread")
task, thread = asyncio.create_task(work()), threading.Thread(target=work_in_thread)
thread.start()"""


@pytest.mark.filterwarnings("ignore")
def test_what_tasks_show_after_their_cell_is_in_the_saved_notebook() -> None:
    """For cells that are done, nbclient drops messages: those of a kernel's own tasks are lost."""
    notebook = _notebook(
        START, LATE, "%%distributed\nawait task\nthread.join()", "%%distributed\n0", "%distributed stop"
    )
    NotebookClient(notebook, kernel_name="python3").execute()
    first, *later = (cell.outputs for cell in notebook.cells[1:])
    shown = [output.data["text/plain"] for output in first if output.output_type == "display_data"]
    assert sum("done by the task" in text for text in shown) == sum("done by the thread" in text for text in shown) == 2
    text = "".join(output.text for outputs in later for output in outputs if output.output_type == "stream")
    assert "from the task" in text
    assert "from the thread" in text
