"""Markup and scripts in what ranks say (names, labels, output, errors, file names) never run in a page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import nbformat
import pytest
from nbconvert import HTMLExporter

from tests.support.browser.lab_server import LIMIT

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Browser

    from tests.support.browser.lab_page import LabPage
    from tests.support.browser.lab_server import LabServer

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]

HOSTILE = "<img src=x onerror=pwned=1><script>pwned=2</script>\"'</script><svg onload=pwned=3>"
SETUP = f"""%%distributed
import axon_nb, time
hostile = {HOSTILE!r}
kind = type(hostile, (torch.nn.Linear,), {{}})
model = torch.nn.Sequential()
model.add_module(hostile, kind(8, 4))
model.register_buffer('<b>' + hostile, torch.ones(3))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
globals()[hostile] = torch.ones(2) + rank
group = dist.new_group([0, 1], group_desc=hostile)
for step in axon_nb.progress(range(3), desc=hostile):
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    dist.all_reduce(torch.ones(4), group=group)
    optimizer.step()
    axon_nb.log(**{{hostile: step, 'loss': 1.0}})
print(hostile, 'printed')"""
CELLS = [
    "%load_ext axon_nb\n%distributed start -n 2",
    "%timeline",
    "%watch",
    SETUP,
    "%shards model",
    "%memory model",
    "%distributed vars",
    "%%distributed --watch\nraise ValueError(hostile)",
    "%%distributed\nif rank: exec(compile('1 / 0', hostile, 'exec'))\ndist.barrier()",
    "%%distributed --out result\nhostile",
    "result",
    "%distributed status",
    "import axon_nb\naxon_nb.current_cluster()",
    f"%%distributed --ranks 1\nimport os\nos.write(2, {HOSTILE.encode()!r})\nos._exit(3)",
    "%distributed repair",
    f"from IPython.display import HTML\nHTML({HOSTILE!r})",
]


def test_markup_from_ranks_never_runs_in_the_page(
    lab: LabServer, page: LabPage, chromium: Browser, tmp_path: Path
) -> None:
    lab.write_notebook("hostile.ipynb", CELLS)
    page.open_notebook("hostile.ipynb")
    for i in range(len(CELLS) - 1):
        page.run_cell(i)
        page.wait_done(i)
        assert page.page.evaluate("typeof pwned") == "undefined", CELLS[i]
    page.page.wait_for_timeout(1000)  # an image that cannot be loaded says so a little later
    assert page.page.evaluate("typeof pwned") == "undefined"
    saved = nbformat.from_dict(page.save())
    shown_text = nbformat.writes(saved)
    assert all(words in shown_text for words in (" printed", "ValueError", "last line: <img"))
    last = len(CELLS) - 1
    page.run_cell(last)
    page.page.wait_for_function("typeof pwned !== 'undefined'")  # it does run where a user displays it as HTML

    body, _ = HTMLExporter().from_notebook_node(saved)
    (tmp_path / "hostile.html").write_text(body, encoding="utf-8")
    shown = chromium.new_page(offline=True)
    shown.set_default_timeout(LIMIT * 1000)
    shown.goto((tmp_path / "hostile.html").as_uri(), wait_until="load")
    assert "printed" in shown.locator("body").inner_text()
    for details in shown.locator("details > summary").all():
        details.click()
    shown.wait_for_timeout(1000)
    assert shown.evaluate("typeof pwned") == "undefined"
    shown.close()
    page.errors[:] = [error for error in page.errors if "/files/x" not in error]  # the picture of the last cell
