"""Saved pictures are readable on light and dark pages, and by screen readers."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from axon_nb.records.colors import ROLES as ROLE_COLORS
from axon_nb.widgets.cell.activity import swatch_svg as activity_swatch
from axon_nb.widgets.html import ACTIVITIES, SPAN_PAINTS, ActivityPaint, SpanPaint
from axon_nb.widgets.memory.view import role_swatch
from axon_nb.widgets.timeline.page import swatch_svg as span_swatch
from tests.support.records.saved_views import VIEWS

ROLES = ("parameters", "gradients", "optimizer", "buffers", "activations", "other", "resident")


@pytest.mark.parametrize("paint", [*SPAN_PAINTS, *ACTIVITIES], ids=lambda paint: paint.label)
def test_pictures_have_the_colours_for_both_pages(paint: SpanPaint | ActivityPaint) -> None:
    swatch = span_swatch(paint) if isinstance(paint, SpanPaint) else activity_swatch(paint)
    assert paint.color.both in swatch


@pytest.mark.parametrize("role", ROLES)
def test_roles_have_the_colours_for_both_pages(role: str) -> None:
    assert ROLE_COLORS[role].both in role_swatch(role)


def test_waiting_differs_from_work_without_colour() -> None:
    forms = {paint.kind: paint.form for paint in SPAN_PAINTS}
    assert [kind for kind, form in forms.items() if form == "wait"] == ["wait"]
    drawn = span_swatch(next(paint for paint in SPAN_PAINTS if paint.kind == "wait"))
    assert "fill-opacity" in drawn
    assert "stroke-width" in drawn, "pale, with a line at its foot"


class Images(HTMLParser):
    """Collects the text alternatives of pictures, and what is needed from elsewhere."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.alternatives: list[str | None] = []
        self.elsewhere: list[str] = []
        self.tags: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.add(tag)
        if tag == "img":
            self.alternatives.append(found.get("alt"))
        for name in ("src", "href"):
            if (value := found.get(name)) and not value.startswith("data:"):
                self.elsewhere.append(value)


@pytest.mark.parametrize("view", sorted(VIEWS))
def test_saved_views_have_words_for_pictures_and_need_nothing_from_elsewhere(view: str) -> None:
    bundle = VIEWS[view]()
    assert set(bundle) == {"text/html", "text/plain"}
    images = Images(bundle["text/html"])
    assert images.alternatives
    assert None not in images.alternatives
    assert any(images.alternatives), "a picture of the facts has words; a sample in the legend has none"
    assert images.elsewhere == []
    assert "table" in images.tags
    assert not images.tags & {"script", "svg", "canvas", "iframe", "link", "style"}
    assert len(bundle["text/plain"].splitlines()) > 1
