"""Notebooks with saved views, opened without a kernel, trusted or not, and as a page without a network."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import nbformat
import pandas as pd
import pytest
from nbconvert import HTMLExporter

from axon_nb.cluster.inspection.spans import SpanStore
from axon_nb.records.spans import Span
from axon_nb.records.telemetry import Activity, RankState
from axon_nb.widgets.cell.activity import RankHistory, strip_bundle
from axon_nb.widgets.html import foldable
from axon_nb.widgets.reports import difference_html, variables_html
from axon_nb.widgets.timeline.page import timeline_bundle
from tests.support.browser.lab_server import LIMIT
from tests.support.records.saved_views import VIEWS
from tests.support.records.steps import straggling_spans

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Browser, Locator

    from tests.support.browser.lab_page import LabPage
    from tests.support.browser.lab_server import LabServer

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]

WIDGET = "application/vnd.jupyter.widget-view+json"


def notebook_with_views() -> Any:
    """As a session leaves it: of each view the widget, whose model is gone, and the picture."""
    notebook = nbformat.v4.new_notebook()
    for view in sorted(VIEWS):
        bundle = VIEWS[view]()
        model = {"model_id": f"{view}-is-gone", "version_major": 2, "version_minor": 0}
        shown = nbformat.v4.new_output("display_data", {WIDGET: model, "text/plain": "A live view"})
        folded = {**bundle, "text/html": foldable(bundle["text/html"])}
        cell = nbformat.v4.new_code_cell(f"%{view}", id=view, execution_count=1)
        cell.outputs = [shown, nbformat.v4.new_output("display_data", folded)]
        notebook.cells.append(cell)
    return notebook


def look_at(output: Locator, view: str) -> None:
    """All pictures are there, open, and a table, below a caption."""
    pictures = output.locator("details img")
    pictures.first.wait_for(state="visible")
    assert pictures.count() > 0, view
    # One that cannot be shown is refused here: `decode` ends when the picture is there, or cannot be.
    drawn = "(all) => Promise.all(all.map((image) => image.decode().then(() => image.naturalWidth > 0, () => false)))"
    assert all(pictures.evaluate_all(drawn)), view
    output.locator("details table").first.wait_for()
    heading = VIEWS[view]()["text/plain"].splitlines()[0]
    caption = output.locator("details > summary").inner_text()
    assert heading[:20] in caption, view
    assert re.search(r"\b\d ranks?\b", caption), view


COLORS = """(output) => [output.querySelector("details [style*='color:#767676']"), output.querySelector("details")]
    .map((node) => getComputedStyle(node).color)"""
"""Of secondary text, and of all other."""


def test_saved_views_render_without_a_kernel(lab: LabServer, page: LabPage) -> None:
    notebook = notebook_with_views()
    for name in ("untrusted", "trusted"):
        nbformat.write(notebook, lab.notebooks / f"views-{name}.ipynb")
    lab.trust("views-trusted.ipynb")
    for name in ("untrusted", "trusted"):
        page.open_notebook(f"views-{name}.ipynb", kernel=False)
        for i, view in enumerate(sorted(VIEWS)):
            look_at(page.output(i), view)
            muted, ink = page.output(i).evaluate(COLORS)
            assert muted != ink, f"secondary text of {view} in a notebook that is {name}"
    # The widgets' models are gone with their kernel; Lab says so in the console.
    page.errors[:] = [error for error in page.errors if "is-gone" not in error and "widget" not in error.lower()]


def test_page_with_saved_views_needs_no_network(chromium: Browser, tmp_path: Path) -> None:
    body, _ = HTMLExporter().from_notebook_node(notebook_with_views())
    path = tmp_path / "views.html"
    path.write_text(body, encoding="utf-8")
    shown = chromium.new_page(offline=True, viewport={"width": 800, "height": 900})
    shown.set_default_timeout(LIMIT * 1000)
    shown.goto(path.as_uri(), wait_until="domcontentloaded")
    cells = shown.locator(".jp-CodeCell")
    for i, view in enumerate(sorted(VIEWS)):
        look_at(cells.nth(i), view)
        if view == "timeline":
            cells.nth(i).get_by_text("0.05 s", exact=True).wait_for()
        if view == "shards":
            cut = "(figure) => figure.scrollWidth - figure.clientWidth"
            assert cells.nth(i).locator("details > figure").evaluate(cut) <= 0, "pictures are cut at 800 px"
    shown.close()


def test_saved_views_are_printed_by_a_dark_browser_that_runs_no_scripts(chromium: Browser, tmp_path: Path) -> None:
    body, _ = HTMLExporter().from_notebook_node(notebook_with_views())
    path = tmp_path / "views.html"
    path.write_text(body, encoding="utf-8")
    context = chromium.new_context(java_script_enabled=False, offline=True, color_scheme="dark")
    shown = context.new_page()
    shown.set_default_timeout(LIMIT * 1000)
    shown.emulate_media(media="print")
    shown.goto(path.as_uri(), wait_until="domcontentloaded")
    cells = shown.locator(".jp-CodeCell")
    for i, view in enumerate(sorted(VIEWS)):
        look_at(cells.nth(i), view)
        muted, ink = cells.nth(i).evaluate(COLORS)
        paper = shown.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper not in (muted, ink), view
    context.close()


WIDER = """() => [...document.querySelectorAll("div, figure")]
    .filter((node) => node.scrollWidth > node.clientWidth)
    .map((node) => `${node.scrollWidth} px: ${node.innerText.slice(0, 40)}`)"""


def test_saved_tables_fit_a_window_of_800_px(chromium: Browser) -> None:
    store, histories = SpanStore(), [RankHistory(rank) for rank in range(4)]
    store.add(span._replace(bytes=1 << 28) for span in straggling_spans(4))
    for history in histories:
        for at, activity in enumerate((Activity.RUNNING, Activity.COLLECTIVE, Activity.WAITING, Activity.DONE)):
            call = "reduce_scatter_tensor" if activity is not Activity.RUNNING else ""
            history.add(RankState(history.rank, activity, at * 10**9, 5, 12, call), now=12.0 * at + 1, since=12.0 * at)
    variables = pd.DataFrame({
        "name": ["model", "batch"], "ranks": ["differs on ranks 2-3", "only on ranks 0-2"], "type": "Linear",
        "shape": "4,198,400 parameters", "dtype": "bfloat16", "bytes": [1 << 20, 1 << 11], "device": "cuda:0",
    })  # fmt: skip
    differences = pd.DataFrame({
        "part": ["model.weight"], "rank": [3], "differing": [4096], "of": [4096], "first at": ["[0, 0]"],
        "largest difference": [0.2466], "values": ["-0.0009359 / 0.06441"],
    })  # fmt: skip
    parts = [bundle["text/html"] for bundle in (
        timeline_bundle(store.table(), range(4), title="In [5]"), strip_bundle(histories, title="", end=48.0, lost=0),
    )]  # fmt: skip
    shown = chromium.new_page(viewport={"width": 600, "height": 900})  # what a notebook leaves an output
    tables = [variables_html(variables), difference_html(differences, 0)]
    shown.set_content(f'<body style="margin:0;font:13px sans-serif">{"".join([*parts, *tables])}')
    assert shown.evaluate(WIDER) == []
    answers = shown.locator("table").last.locator("tbody th").inner_text(), shown.get_by_text("differs on").inner_text()
    assert answers == ("rank\u00a00:\u00a0-0.0009359, rank\u00a03:\u00a00.06441", "differs on ranks\u00a02\u20113")
    shown.close()


def test_saved_views_of_a_cell_of_2000_spans_are_small() -> None:
    store = SpanStore()
    kinds = ("forward", "backward", "collective", "optimizer", "other")
    for rank in range(4):
        ends = [7 * i * i % 13 * 10**6 + i * 10**8 for i in range(501)]
        spans = [Span(rank, kinds[i % 5], f"part{i % 9}", ends[i], ends[i + 1]) for i in range(499)]
        store.add([*spans, Span(rank, "cell", "In [5]", 0, ends[-1])])
    assert len(store.table()) == 2000
    notebook = notebook_with_views()
    picture = foldable(timeline_bundle(store.table(), range(4), title="In [5]")["text/html"])
    cell = next(cell for cell in notebook.cells if cell.id == "timeline")
    cell.outputs[1].data["text/html"] = picture
    assert len(nbformat.writes(notebook)) < 400_000
