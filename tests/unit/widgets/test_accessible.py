"""What the views draw can be told apart: on white and on dark pages, without colours, and by who is told of it only."""

from __future__ import annotations

import itertools
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from axon_nb.widgets.cell.svg import swatch_svg as activity_swatch
from axon_nb.widgets.memory.page import role_swatch
from axon_nb.widgets.palette import OKABE_ITO, PAINTS, SPAN_PAINTS, contrast, needs_outline
from axon_nb.widgets.shards.boxes import rank_color, text_color
from axon_nb.widgets.timeline.svg import swatch_svg as span_swatch
from tests.support.saved_views import VIEWS

STATIC = Path(__file__).parents[3] / "axon_nb" / "widgets" / "static"
PAGES = ("#FFFFFF", "#111111")
EDGE = "#767676"
ON_ANOTHER = {"#FFF", "#222", "#EEE"}
"""In style sheets: what is not on the page, but on a colour of ours, or behind a tip's own text."""
ROLES = ("parameters", "gradients", "optimizer", "buffers", "activations", "other", "resident")


def least(color: str) -> float:
    """The contrast on the page where it is less."""
    return min(contrast(color, page) for page in PAGES)


def test_an_edge_shows_on_both_pages() -> None:
    assert least(EDGE) >= 3


def test_every_paint_shows_on_both_pages() -> None:
    drawn = [(paint.color, activity_swatch(paint)) for paint in PAINTS]
    drawn += [(paint.color, span_swatch(paint)) for paint in SPAN_PAINTS]
    assert any(least(color) < 3 for color, _ in drawn)
    for color, svg in drawn:
        assert color in svg
        assert least(color) >= 3 or f'stroke="{EDGE}"' in svg, color


def test_roles_of_memory_show_on_both_pages() -> None:
    for role in ROLES:
        drawn = role_swatch(role)
        fill = re.search(r'fill="(#\w{6})"', drawn)
        assert fill is not None
        assert least(fill[1]) >= 3 or f'stroke="{EDGE}"' in drawn, role


@pytest.mark.parametrize("lane", [0, 1])
def test_kinds_of_spans_differ_by_pattern_in_each_lane(lane: int) -> None:
    drawn = [paint.pattern for paint in SPAN_PAINTS if paint.lane == lane or (lane == 1 and paint.kind == "wait")]
    assert len(set(drawn)) == len(drawn)


def test_roles_of_memory_differ_without_their_colours() -> None:
    drawn = [re.sub(r"#\w{6}", "", role_swatch(role)).replace(role, "") for role in ROLES[:-1]]
    assert len(set(drawn)) == len(drawn)


def test_the_first_sixteen_ranks_differ_and_their_numbers_can_be_read() -> None:
    looks = [rank_color(rank) for rank in range(16)]
    assert len(set(looks)) == 16
    for color, _ in looks:
        assert least(color) >= 3
        assert contrast(color, text_color(color)) >= 4.5


@pytest.mark.parametrize("path", sorted(STATIC.rglob("*.css")), ids=lambda path: path.relative_to(STATIC).as_posix())
def test_colours_of_style_sheets_show_on_both_pages(path: Path) -> None:
    for rule in re.findall(r"[^{}]*\{[^{}]*\}", path.read_text(encoding="utf-8")):
        colors = {found.upper() for found in re.findall(r"#(?:[0-9a-fA-F]{6}|[0-9a-fA-F]{3})\b", rule)} - ON_ANOTHER
        pale = {color for color in colors if least(color) < 3}
        assert not pale or EDGE in rule or "var(--axon-edge)" in rule, f"{path.name}: {rule}"


BLINDNESS = {
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
"""What is seen of linear RGB (Machado, Oliveira and Fernandes, 2009, severity 1)."""


def seen(color: str, matrix: tuple[tuple[float, ...], ...]) -> list[float]:
    """A colour as it looks, in sRGB from 0 to 1."""
    linear = [(int(color[i : i + 2], 16) / 255) ** 2.2 for i in (1, 3, 5)]
    return [max(0.0, min(1.0, sum(a * b for a, b in zip(row, linear, strict=True)))) ** (1 / 2.2) for row in matrix]


@pytest.mark.parametrize("blindness", sorted(BLINDNESS))
def test_strong_colours_differ_for_colour_blind_people(blindness: str) -> None:
    strong = [color for name, color in OKABE_ITO.items() if not needs_outline(color) and name != "grey"]
    for first, second in itertools.combinations(strong, 2):
        a, b = (seen(color, BLINDNESS[blindness]) for color in (first, second))
        assert sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) ** 0.5 > 0.1, (first, second)


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
