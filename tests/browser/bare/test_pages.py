"""Each view's script in a bare page, as anywidget runs it: drawing, closing, pointer and keyboard."""

from __future__ import annotations

import base64
import os
from typing import TYPE_CHECKING, Any

import pytest

from axon_nb.cluster.inspection.spans import SpanStore
from axon_nb.records.spans import Span
from axon_nb.records.telemetry import Activity, RankState
from axon_nb.widgets.assets import script
from axon_nb.widgets.cell.activity import Clock, RankHistory, encode
from axon_nb.widgets.cell.views import RankStrip
from axon_nb.widgets.html import SPAN_CODES, paints_for_page
from axon_nb.widgets.memory.view import MemoryView
from axon_nb.widgets.shards import ShardsView
from axon_nb.widgets.timeline.view import pack
from axon_nb.widgets.watch.view import WatchView
from tests.browser.bare.view_pages import SAMPLES, page_html
from tests.support.browser.lab_server import LIMIT
from tests.support.records.jobs import answers, report, row
from tests.support.records.memory_replies import answers as memory_answers
from tests.support.records.memory_replies import use
from tests.support.records.shard_records import split

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Browser, Page


pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]

WIDTHS = (620, 1600)
"""Of narrow and wide pages; a notebook in a window of 800 px leaves a view 600 to 700."""


def open_page(browser: Browser, folder: Path, name: str, traits: dict[str, Any], **look: Any) -> tuple[Page, list[str]]:
    """A page with one view, and the list of its errors."""
    path = folder / f"{name}.html"
    dark = look.pop("dark", False)
    path.write_text(page_html(name, traits, dark=dark), encoding="utf-8")
    page = browser.new_page(offline=True, **look)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.set_default_timeout(LIMIT * 1000)
    page.goto(path.as_uri())
    return page, errors


def strip_message() -> bytes:
    """Two ranks, one of which waits."""
    histories = [RankHistory(0), RankHistory(1)]
    for history in histories:
        history.add(RankState(history.rank, Activity.RUNNING, 0, line=2), now=0.5, since=0.25)
    histories[1].add(RankState(1, Activity.WAITING, 0, line=3, call="all_reduce"), now=1.5, since=1.0)
    return encode(histories, Clock(now=2.0, lost=0, finished=False), starts=[0, 0])


def timeline_message(*, number: int = 7, is_last: bool = False) -> bytes:
    """Two ranks with a forward and a collective each; with another forward at the end."""
    store = SpanStore()
    for rank in range(2):
        store.add([Span(rank, "forward", "GPT", 0, 10**9), Span(rank, "collective", "all_reduce", 10**9, 2 * 10**9)])
        store.add([Span(rank, "forward", "GPT", 3 * 10**9, 4 * 10**9)] * is_last)
    table = store.table()
    header = {
        "labels": [[SPAN_CODES[kind], name, group] for kind, name, group in table.labels],
        "labelsFrom": 0,
        "groups": {},
        "oldest": 0,
        "dropped": 0,
        "lost": 0,
        "now": 4.0,
        "number": number,
        "focus": [0.0, 4.0],
        "finished": is_last,
        "restart": True,
    }
    return pack(table, header, origin_ns=0)


def contents() -> dict[str, dict[str, Any]]:
    """What the kernel sides of the views without messages draw."""
    watch, memory = WatchView(lambda: None), MemoryView("model")
    watch.add([answers(report(0, [row(0, loss=2.0)]), report(1, [row(0, loss=3.0)]))], 0.0)
    memory.show(memory_answers(use(0), use(1)))
    shards = ShardsView("model", split((8, 6), (2, 2), (0, 1)))
    found = {}
    for name, view in (("watch", watch), ("memory", memory), ("shards", shards)):
        if name != "shards":
            view.refresh(unseen=True)
        state = view.get_state()
        found[name] = {key: value for key, value in state.items() if not key.startswith("_")}
        view.close()
    return found


@pytest.mark.parametrize(
    ("name", "words"),
    [("watch", "2.5"), ("memory", "170 MiB"), ("shards", "rows over dp (2), columns over tp (2)")],
)
def test_content_view_draws_reports_open_and_closes(chromium: Browser, tmp_path: Path, name: str, words: str) -> None:
    page, errors = open_page(chromium, tmp_path, name, contents()[name])
    page.get_by_text(words).first.wait_for()
    page.wait_for_function("() => sent.some((message) => message.op === 'heartbeat')")
    page.evaluate("handlers['change:content']()")
    assert page.evaluate("end()") == 0
    assert errors == []
    page.close()


@pytest.mark.parametrize("name", ["strip", "timeline"])
def test_message_view_draws_replies_and_closes(chromium: Browser, tmp_path: Path, name: str) -> None:
    if name == "strip":
        view = RankStrip([0, 1], title="In [1]")
        config: Any = view.config
        view.close()
        message, drawn = strip_message(), "segments === '3'"
    else:
        config = {"ranks": [0, 1], "title": "In [1]", "paints": paints_for_page()}
        message, drawn = timeline_message(), "found === '4'"
    page, errors = open_page(
        chromium, tmp_path, name, {"config": config, "tools": script("timeline/tools/tools"), "snapshot": None}
    )
    page.locator(f".axon-{name}").wait_for()
    page.evaluate("(text) => append(text)", base64.b64encode(message).decode())
    page.wait_for_function(f"() => document.querySelector('.axon-{name}-canvas').dataset.{drawn}")
    if name == "timeline":
        page.wait_for_function("() => sent.some((message) => message.op === 'ack' && message.number === 7)")
    # A stretch marked with the mouse can be shown alone; Home shows everything again.
    canvas = page.locator(f".axon-{name}-canvas")
    box = canvas.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 10, box["y"] + 30)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + 8)
    page.mouse.up()
    if name == "timeline":  # there a marked stretch is measured first
        page.get_by_role("button", name="zoom in", exact=True).click()
    shown = f"document.querySelector('.axon-{name}-canvas').dataset.view"
    view = f"const [from, to] = {shown}.split(',').map(Number);"
    page.wait_for_function(f"() => {{ {view} return from > 0.01; }}")
    marked = page.evaluate(f"() => {{ {view} return to - from; }}")
    canvas.press("Home")
    page.wait_for_function(f"(marked) => {{ {view} return from === 0 && to > 3 * marked; }}", arg=marked)
    assert page.evaluate("end()") == 0
    assert errors == []
    page.close()


OVERVIEW = """(at) => {
    const canvas = document.querySelector('.axon-timeline-overview');
    const [x, y] = [Math.round(at * canvas.width), Math.round(canvas.height / 2)];
    const pixel = (x) => String(canvas.getContext('2d').getImageData(x, y, 1, 1).data);
    return pixel(x) !== pixel(Math.round(0.625 * canvas.width));  // there is nothing at 2.5 s
}"""


def test_overview_of_a_cell_has_its_end(chromium: Browser, tmp_path: Path) -> None:
    config: Any = {"ranks": [0, 1], "title": "In [1]", "paints": paints_for_page()}
    traits = {"config": config, "tools": script("timeline/tools/tools"), "snapshot": None}
    page, errors = open_page(chromium, tmp_path, "timeline", traits)
    page.locator(".axon-timeline").wait_for()
    running, ended = (
        base64.b64encode(timeline_message(number=1 + is_last, is_last=is_last)).decode() for is_last in (False, True)
    )
    page.evaluate("(text) => append(text)", running)
    page.wait_for_function(OVERVIEW, arg=0.125)
    page.evaluate("([running, ended]) => { append(running); append(ended); }", [running, ended])
    page.wait_for_function(OVERVIEW, arg=0.875, timeout=10_000)
    assert errors == []
    page.close()


@pytest.mark.parametrize("ranks", [4, 32, 256])
@pytest.mark.parametrize("sample", sorted(SAMPLES))
def test_view_fits_light_dark_narrow_and_wide_pages(chromium: Browser, tmp_path: Path, sample: str, ranks: int) -> None:
    """Light and dark, narrow and wide; set AXON_NB_SCREENSHOTS to a folder to look at them."""
    if ranks == 256 and sample == "pipeline":
        pytest.skip("a pipeline of 256 stages is not one that anybody runs")
    name, make = SAMPLES[sample]
    traits = make(ranks)
    for dark, width in ((False, WIDTHS[0]), (True, WIDTHS[1])):
        page, errors = open_page(chromium, tmp_path, name, traits, dark=dark, viewport={"width": width, "height": 900})
        view = page.locator(".axon-view").first
        view.wait_for()
        page.wait_for_timeout(100)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
        clipped = "(root) => root.scrollWidth - root.clientWidth"
        assert view.evaluate(clipped) <= 1
        if ranks == 4:
            scrolled = "(all, clipped) => all.filter(eval(clipped)).map((node) => node.className)"
            parts = view.locator("[class*=scroll]")
            assert parts.evaluate_all(scrolled, f"(root) => ({clipped})(root) > 1") == [], "a part scrolls sideways"
        assert "" not in page.locator(".axon-view th").all_inner_texts(), "a title that screen readers cannot read"
        if folder := os.environ.get("AXON_NB_SCREENSHOTS"):
            view.screenshot(path=f"{folder}/{sample}-{ranks}-{'dark' if dark else 'light'}-{width}.png")
        assert errors == []
        page.close()


def test_mesh_selects_rank_and_equal_blocks_unfold(chromium: Browser, tmp_path: Path) -> None:
    page, errors = open_page(chromium, tmp_path, "shards", SAMPLES["shards"][1](4))
    rows = page.locator(".axon-shards tbody tr[data-name]")
    folded = rows.count()
    page.get_by_role("button", name="rank 2: dp 1, tp 0").click()
    page.locator(".axon-shards-state", has_text="rank 2 (dp 1, tp 0) holds").wait_for()
    parts = page.locator(".axon-shards-part").evaluate_all(
        "(all) => all.map((part) => [part.dataset.ranks.split(' ').includes('2'), part.hasAttribute('data-pale')])"
    )
    assert {True, False} == {own for own, _ in parts}
    assert all(own != pale for own, pale in parts)
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.locator(".axon-shards-state", has_text="rank 3 (dp 1, tp 1)").wait_for()
    page.keyboard.press("Enter")
    page.wait_for_function("() => !document.querySelector('.axon-shards-part[data-pale]')")
    fold = page.locator(".axon-shards-fold").first
    alike = int(fold.inner_text().split()[1])
    assert alike > 1
    fold.click()
    page.wait_for_function(
        "(n) => document.querySelectorAll('.axon-shards tbody tr[data-name]').length === n", arg=folded + alike - 1
    )
    assert errors == []
    page.close()


BESIDE = """(row) => {
    const [name, where, picture] = ["th", "td:nth-child(4)", "svg"].map(
        (part) => row.querySelector(part).getBoundingClientRect());
    return picture.left >= name.right && picture.left >= where.right && Math.abs(picture.top - name.top) < 12;
}"""


def test_pictures_of_shards_stand_beside_their_names_on_a_narrow_page(chromium: Browser, tmp_path: Path) -> None:
    traits = SAMPLES["shards"][1](4)
    page, errors = open_page(chromium, tmp_path, "shards", traits, viewport={"width": WIDTHS[0], "height": 900})
    rows = page.locator(".axon-shards tbody tr[data-name]")
    rows.first.wait_for()
    assert rows.evaluate_all(f"(rows) => rows.every({BESIDE})")
    assert errors == []
    page.close()


@pytest.mark.parametrize(("view", "most"), [("watch", 2), ("memory", 1)])
def test_update_makes_the_browser_lay_out_the_page_once(
    chromium: Browser, tmp_path: Path, view: str, most: int
) -> None:
    """Each reading of a size between two changes is a layout more, in which no frame is drawn while one scrolls."""
    page, errors = open_page(chromium, tmp_path, view, SAMPLES[view][1](4), viewport={"width": 1000, "height": 900})
    page.locator(f".axon-{view} tbody tr").first.wait_for()
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")

    def layouts() -> int:
        found = session.send("Performance.getMetrics")["metrics"]
        return int(next(metric["value"] for metric in found if metric["name"] == "LayoutCount"))

    page.wait_for_timeout(300)
    before = layouts()
    page.evaluate("() => { for (let i = 0; i < 50; i++) handlers['change:content'](); }")
    assert layouts() - before <= 50 * most + 10
    assert errors == []
    page.close()


COUNT_PATTERNS = """() => {
    window.patterns = 0;
    const make = CanvasRenderingContext2D.prototype.createPattern;
    CanvasRenderingContext2D.prototype.createPattern = function (...options) {
        window.patterns++;
        return make.apply(this, options);
    };
}"""


@pytest.mark.parametrize("contrast", ["no-preference", "more"])
def test_patterns_are_drawn_on_request(chromium: Browser, tmp_path: Path, contrast: Any) -> None:
    page = chromium.new_page(offline=True, contrast=contrast)
    page.add_init_script(f"({COUNT_PATTERNS})()")
    path = tmp_path / "timeline.html"
    path.write_text(page_html("timeline", SAMPLES["timeline"][1](4)), encoding="utf-8")
    page.goto(path.as_uri())
    page.wait_for_function("() => document.querySelector('.axon-timeline-canvas')?.dataset.found > 0")
    assert (page.evaluate("window.patterns") > 0) == (contrast == "more")
    if contrast == "no-preference":
        button = page.get_by_role("button", name="patterns")
        button.click()
        page.wait_for_function("() => window.patterns > 0")
        assert button.get_attribute("aria-pressed") == "true"
    page.close()


def test_cursor_is_shared_by_curves_of_an_axis(chromium: Browser, tmp_path: Path) -> None:
    page, errors = open_page(chromium, tmp_path, "watch", SAMPLES["watch"][1](4))
    loss = page.locator("svg[aria-label^='loss:']")
    assert loss.get_attribute("data-earlier") == "1"
    assert loss.locator("text", has_text="In [4]").count() == 1, "a run is marked where it begins"
    assert page.locator("svg[aria-label^='accuracy:']").count() == 0, "only an earlier run has logged it"
    loss.hover(position={"x": 200, "y": 60})
    tip = page.locator(".axon-watch .axon-view-tip")
    tip.wait_for()
    words = tip.inner_text()
    assert words.startswith("step ")
    assert all(name in words for name in ("loss", "grad_norm", "lr"))
    assert "steps/s" not in words, "what is measured has another axis"
    shown = "[...document.querySelectorAll('.axon-view-chart-cursor')].filter((line) => line.getAttribute('d')).length"
    assert page.evaluate(shown) == 3
    loss.focus()
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    assert page.locator(".axon-watch [aria-live]").inner_text().startswith("loss, step ")
    assert page.evaluate(shown) == 3
    lowest = "document.querySelector(`svg[aria-label^='${name}:']`).dataset.low"
    for name in ("steps/s", "communication", "memory"):
        assert page.evaluate(f"(name) => {lowest}", name) == "0"
    page.get_by_role("button", name="0.9").click()
    assert page.locator(".axon-view-chart-raw[d^=M]").count() == 2, "loss and grad_norm; lr steps"
    assert errors == []
    page.close()


def test_treemap_resizes_with_the_page(chromium: Browser, tmp_path: Path) -> None:
    page, errors = open_page(
        chromium, tmp_path, "shards", SAMPLES["shards"][1](4), viewport={"width": 1400, "height": 900}
    )
    page.get_by_role("button", name="by bytes").click()
    width = "Number(document.querySelector('.axon-shards-map').getAttribute('width'))"
    page.wait_for_function(f"() => {width} > 1200")
    page.set_viewport_size({"width": 700, "height": 900})
    page.wait_for_function(f"() => {width} < 700")
    assert page.locator(".axon-shards-map .axon-shards-tile").count() == 41
    names = page.locator(".axon-shards-tile-label").all_text_contents()
    assert any(name.startswith(("qkv.weight", "up.weight")) for name in names)
    assert errors == []
    page.close()
