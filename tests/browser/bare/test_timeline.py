"""What a person does with a timeline in a bare page: show the late rank, move, point, pin, measure, unfold."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest

from axon_nb.records.spans import Span
from tests.browser.bare.test_pages import open_page
from tests.browser.bare.view_pages import SAMPLES, timeline
from tests.support.records.steps import straggling_spans

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]


def numbers(page: Page, attribute: str) -> list[float]:
    """What a canvas says of itself."""
    text = page.locator(".axon-timeline-canvas").get_attribute(f"data-{attribute}") or ""
    return [float(part) for part in text.split(",")]


def test_click_toggles_between_late_rank_and_all_ranks(chromium: Browser, tmp_path: Path) -> None:
    page, errors = open_page(chromium, tmp_path, "timeline", SAMPLES["timeline"][1](4))
    page.locator(
        ".axon-view-notice", has_text="Rank 2 is a straggler: it runs code of its own, 39.8 ms more per step"
    ).wait_for()
    figures = page.locator(".axon-view-figures").inner_text().split()
    assert {"step", "computing", "waiting", "hidden"} <= set(figures)
    every, whole = numbers(page, "found"), numbers(page, "view")
    page.get_by_role("button", name="show it").click()
    highlight = page.locator(".axon-timeline-highlight[data-late='2']")
    highlight.wait_for()
    start, end = numbers(page, "view")
    assert 0.1 < end - start < 0.14, "one step of 120 ms"
    assert numbers(page, "found")[0] >= 4 * 9, "the spans of all ranks"
    lit = """(canvas) => [0, 1, 2, 3].map((rank) => {
        const [height, context] = [canvas.height / 4, canvas.getContext("2d")];
        const { data } = context.getImageData(0, Math.round((rank + 0.5) * height), canvas.width, 1);
        return data.filter((value, i) => i % 4 === 3 && !value).length / canvas.width;
    })"""
    shares = highlight.evaluate(lit)
    assert shares[2] == 1, "the late rank"
    assert all(0.1 < share < 0.9 for rank, share in enumerate(shares) if rank != 2), "the waits for it"
    page.get_by_role("button", name="show it").click()
    page.locator(".axon-timeline-highlight").wait_for(state="hidden")
    assert numbers(page, "view") == whole
    page.wait_for_function(
        "(all) => Number(document.querySelector('.axon-timeline-canvas').dataset.found) === all", arg=every[0]
    )
    legend = page.locator(".axon-timeline-key", has_text="own code").inner_text()
    assert legend.split() == ["own", "code", "18%"]
    assert errors == []
    page.close()


def test_overview_pans_the_timeline(chromium: Browser, tmp_path: Path) -> None:
    page, errors = open_page(chromium, tmp_path, "timeline", SAMPLES["timeline"][1](4))
    canvas = page.locator(".axon-timeline-canvas")
    canvas.focus()
    for _ in range(2):
        page.keyboard.press("+")
    quarter = "document.querySelector('.axon-timeline-canvas').dataset.view.split(',').map(Number)"
    page.wait_for_function(f"() => {{ const [from, to] = {quarter}; return to - from < 0.25; }}")
    before = numbers(page, "view")
    box = page.locator(".axon-timeline-overview").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 10)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.75 * box["width"], box["y"] + 10)
    page.mouse.up()
    page.wait_for_function(f"(before) => {{ const [from] = {quarter}; return from > before + 0.1; }}", arg=before[0])
    after = numbers(page, "view")
    whole = before[1] - before[0] + 3 * (before[1] - before[0])
    assert after[0] - before[0] == pytest.approx(whole / 4, rel=0.05)
    assert after[1] - after[0] == pytest.approx(before[1] - before[0], rel=1e-3)
    assert errors == []
    page.close()


def test_hovered_collective_is_highlighted_on_all_ranks(chromium: Browser, tmp_path: Path) -> None:
    page, errors = open_page(chromium, tmp_path, "timeline", SAMPLES["timeline"][1](4))
    canvas = page.locator(".axon-timeline-canvas")
    box = canvas.bounding_box()
    assert box is not None
    highlight = page.locator(".axon-timeline-highlight")
    # The last all_reduce of the first step ends at 115 of 725 ms; row 0, lower lane.
    canvas.hover(position={"x": box["width"] * 108 / 725, "y": 33})
    page.wait_for_function("() => document.querySelector('.axon-timeline-highlight').dataset.family === '4'")
    assert highlight.is_visible()
    tip = page.locator(".axon-timeline-tip")
    assert tip.inner_text().startswith("all_reduce")
    assert "waited for rank 2" in tip.inner_text()
    place = tip.bounding_box()
    assert place is not None
    below, above = place["y"] - box["y"] - box["height"], box["y"] - place["y"] - place["height"]
    assert max(below, above) >= 0, "it covers a call"
    canvas.press("Home")
    tip.wait_for(state="hidden")
    canvas.hover(position={"x": box["width"] * 20 / 725, "y": 15})  # a forward stands alone
    highlight.wait_for(state="hidden")
    assert errors == []
    page.close()


def test_part_of_the_own_code_has_one_name(chromium: Browser, tmp_path: Path) -> None:
    spans = [Span(rank, "cell", "In [5]", 0, 10**9) for rank in range(2)]
    spans += [Span(0, "gc", "garbage collection", 3 * 10**8, 9 * 10**8)]
    spans += [Span(1, "gc", "garbage collection", 5 * 10**8, 502 * 10**6)]
    page, errors = open_page(chromium, tmp_path, "timeline", timeline(2, spans))
    page.evaluate(
        """() => {
            window.words = [];
            const write = CanvasRenderingContext2D.prototype.fillText;
            CanvasRenderingContext2D.prototype.fillText = function (text, ...place) {
                if (this.canvas.classList.contains("axon-timeline-canvas")) window.words.push(text);
                return write.call(this, text, ...place);
            };
        }"""
    )
    page.locator(".axon-timeline-canvas").press("Home")
    page.wait_for_function("() => window.words.length >= 2")
    assert page.evaluate("window.words.slice(0, 2)") == ["garbage collection", "own code"]
    page.set_viewport_size({"width": 250, "height": 600})  # now there is no room for the longer name
    page.wait_for_function("() => window.words.slice(-2).every((text) => text === 'own code')")
    assert errors == []
    page.close()


def drag(page: Page, start: float, end: float) -> None:
    """Mark a stretch of the timeline, from and to these shares of its width."""
    box = page.locator(".axon-timeline-canvas").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + start * box["width"], box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + end * box["width"], box["y"] + 20)
    page.mouse.up()


def test_click_pins_span_with_its_line_and_matching_calls(chromium: Browser, tmp_path: Path) -> None:
    spans = straggling_spans(4)
    # The code that waits for a call, of the same name and number, is not another call.
    waits = [own._replace(kind="wait") for own in spans if own.kind == "collective" and own.rank != 2]
    page, errors = open_page(chromium, tmp_path, "timeline", timeline(4, [*spans, *waits]))
    canvas = page.locator(".axon-timeline-canvas")
    box = canvas.bounding_box()
    assert box is not None
    canvas.click(position={"x": box["width"] * 108 / 725, "y": 33})
    details = page.locator(".axon-timeline-details")
    details.get_by_text("line 12").wait_for()
    words = details.inner_text()
    for fact in ("all_reduce", "4.00 MiB", "ranks 0-3", "waited for rank 2"):
        assert fact in words
    calls = details.locator("li").all_inner_texts()
    assert [call.split()[:2] for call in calls] == [["rank", str(rank)] for rank in range(4)]
    assert [rank for rank, call in enumerate(calls) if "came last" in call] == [2]
    page.mouse.move(0, 0)  # it stays
    assert details.inner_text() == words
    canvas.press("Escape")
    page.wait_for_function("() => !document.querySelector('.axon-timeline-details').childElementCount")
    canvas.press("ArrowDown")
    canvas.press("n")
    canvas.press("Enter")
    details.get_by_text("forward GPT").wait_for()
    assert errors == []
    page.close()


def test_time_ranges_are_measured_and_compared(chromium: Browser, tmp_path: Path) -> None:
    page, errors = open_page(chromium, tmp_path, "timeline", SAMPLES["timeline"][1](4))
    drag(page, 0.2, 0.4)
    details = page.locator(".axon-timeline-details")
    rows = details.locator("tbody tr")
    rows.first.wait_for()
    title = details.locator("b").inner_text()
    assert title.endswith(" ms")
    length = float(title.split()[0])
    cells = {name: rest for name, *rest in (text.split("\t") for text in rows.all_inner_texts())}
    assert "rank 2" in cells["waiting"][1], "the late rank waits least"
    parts = {name: float(rest[0].split()[0]) for name, rest in cells.items()}
    assert parts["computing"] + parts["own code"] + parts["waiting"] == pytest.approx(length, rel=0.05)
    page.keyboard.down("Shift")
    drag(page, 0.5, 0.6)
    page.keyboard.up("Shift")
    details.get_by_text("beside").wait_for()
    cells = {name: rest for name, *rest in (text.split("\t") for text in rows.all_inner_texts())}
    assert cells["waiting"][2].startswith("−"), "half as long a stretch has less waiting"
    assert errors == []
    page.close()


def test_many_ranks_are_folded_except_the_late_one(chromium: Browser, tmp_path: Path) -> None:
    page, errors = open_page(chromium, tmp_path, "timeline", SAMPLES["timeline"][1](256))
    names = page.locator(".axon-timeline-names > div")
    names.nth(8).wait_for()
    texts = names.all_inner_texts()
    assert texts[:3] == ["rank 2", "▸ 0–31 (31)", "▸ 32–63"]
    assert len(texts) == 9
    page.get_by_role("button", name="32–63").click()
    page.wait_for_function("() => document.querySelectorAll('.axon-timeline-names > div').length === 40")
    assert names.nth(2).inner_text().endswith("rank 32")
    assert errors == []
    page.close()


def test_visible_timeline_is_saved_as_image(chromium: Browser, tmp_path: Path) -> None:
    page, errors = open_page(chromium, tmp_path, "timeline", SAMPLES["timeline"][1](4))
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save what is shown as a picture").click()
    path = tmp_path / "saved.png"
    saved.value.save_as(path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", content[16:24])
    box = page.locator(".axon-timeline-canvas").bounding_box()
    assert box is not None
    assert width > box["width"]
    assert height > box["height"]
    assert errors == []
    page.close()
