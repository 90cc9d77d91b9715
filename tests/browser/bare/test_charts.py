"""Curves and the treemap in a bare page: pointer, keyboard, and width of the page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.browser.bare.test_pages import open_page
from tests.browser.bare.view_pages import SAMPLES

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Browser

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]


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
