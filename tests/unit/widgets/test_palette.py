"""Saved pictures are readable on light and dark pages, by four kinds of eyes and by screen readers."""

from __future__ import annotations

import itertools
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from axon_nb.records.colors import KINDS, RANKS, ROLES, STATES, Color, contrast
from axon_nb.records.memory import ROLES as MEMORY_ROLES
from axon_nb.records.telemetry import Activity
from axon_nb.widgets import assets
from axon_nb.widgets.cell.activity import swatch_svg as activity_swatch
from axon_nb.widgets.html import (
    ACTIVITIES,
    ACTIVITY_CODES,
    SPAN_PAINTS,
    ActivityPaint,
    SpanPaint,
    palette_css,
    rank_color,
    text_color,
)
from axon_nb.widgets.memory.view import role_swatch
from axon_nb.widgets.timeline.page import swatch_svg as span_swatch
from tests.support.records.saved_views import VIEWS

STATIC = Path(assets.__file__).parent / "static"
PAGES = {"light": ["#FFFFFF"], "dark": ["#111111"], "both": ["#FFFFFF", "#111111"]}
THEMES = sorted(PAGES)

Matrix = tuple[tuple[float, float, float], ...]
EYES: dict[str, Matrix] = {
    "all": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "no green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "no blue": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
"""What is seen of linear RGB (Machado, Oliveira and Fernandes, 2009, severity 1)."""
TO_CONES: Matrix = (
    (0.4122214708, 0.5363325363, 0.0514459929),
    (0.2119034982, 0.6806995451, 0.1073969566),
    (0.0883024619, 0.2817188376, 0.6299787005),
)
TO_LAB: Matrix = (
    (0.2104542553, 0.7936177850, -0.0040720468),
    (1.9779984951, -2.4285922050, 0.4505937099),
    (0.0259040371, 0.7827717662, -0.8086757660),
)

FORM_ROLES = ("parameters", "gradients", "optimizer", "buffers", "activations", "other", "resident")


def times(matrix: Matrix, vector: list[float]) -> list[float]:
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def lab(color: str, eyes: str) -> list[float]:
    """A colour in OKLab, as these eyes see it."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    seen = [max(0.0, min(1.0, value)) for value in times(EYES[eyes], linear)]
    return times(TO_LAB, [cone ** (1 / 3) for cone in times(TO_CONES, seen)])


def distance(first: str, second: str) -> float:
    """In OKLab times 100, for the eyes that see the least of it."""
    return min(
        100 * sum((a - b) ** 2 for a, b in zip(lab(first, eyes), lab(second, eyes), strict=True)) ** 0.5
        for eyes in EYES
    )


def of(color: Color, theme: str) -> str:
    return str(getattr(color, theme))


ALL = {
    **{f"kind {name}": color for name, color in KINDS.items()},
    **{f"role {name}": color for name, color in ROLES.items()},
    **{f"rank {number}": color for number, color in enumerate(RANKS)},
    **{f"state {name}": words for name, (words, _) in STATES.items()},
}


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("name", sorted(ALL))
def test_every_colour_stands_out_from_its_page(name: str, theme: str) -> None:
    color = of(ALL[name], theme)
    assert min(contrast(color, page) for page in PAGES[theme]) >= 3


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("state", sorted(STATES))
def test_words_can_be_read_on_the_page_and_on_their_plane(state: str, theme: str) -> None:
    words, plane = (of(color, theme) for color in STATES[state])
    assert contrast(words, PAGES[theme][0]) >= 4.5
    assert contrast(words, plane) >= 4.5


LANES = (("forward", "backward", "optimizer"), ("collective", "p2p"))


@pytest.mark.parametrize("theme", THEMES)
def test_kinds_of_work_differ_for_all_eyes(theme: str) -> None:
    for lane in LANES:
        for first, second in itertools.combinations(lane, 2):
            assert distance(of(KINDS[first], theme), of(KINDS[second], theme)) >= 10, (first, second)
    work = [name for name in KINDS if name not in ("wait", "other")]  # pale with a foot, and grey
    for first, second in itertools.combinations(work, 2):
        assert distance(of(KINDS[first], theme), of(KINDS[second], theme)) >= 5, (first, second)


@pytest.mark.parametrize("theme", THEMES)
def test_neighbouring_ranks_and_roles_differ_for_all_eyes(theme: str) -> None:
    for first, second in itertools.pairwise(RANKS):
        assert distance(of(first, theme), of(second, theme)) >= 7, (first, second)
    shown = [ROLES[role] for role in MEMORY_ROLES]
    for first, second in itertools.pairwise(shown):
        assert distance(of(first, theme), of(second, theme)) >= 5, (first, second)


def test_the_first_eight_ranks_differ_and_their_numbers_can_be_read() -> None:
    assert len({rank_color(rank) for rank in range(8)}) == 8
    for color in RANKS:
        for theme in THEMES:
            assert contrast(of(color, theme), text_color(of(color, theme))) >= 4.5


def test_words_on_the_bars_of_memory_can_be_read() -> None:
    blocks = re.findall(r"\{\n((?:  --axon-[\w-]+: #\w{6};\n)+)\}", palette_css())
    for block in blocks:
        tokens = dict(re.findall(r"--axon-([\w-]+): (#\w{6});", block))
        for role in ROLES:
            assert contrast(tokens[f"role-{role}"], tokens[f"on-role-{role}"]) >= 4.5, role


def test_work_and_its_memory_share_a_colour() -> None:
    made = {"activations": "forward", "gradients": "backward", "optimizer": "optimizer", "communication": "collective"}
    assert {role: ROLES[role] for role in made} == {role: KINDS[kind] for role, kind in made.items()}
    assert set(ROLES) >= set(MEMORY_ROLES)
    assert [paint.color for paint in SPAN_PAINTS if paint.kind in KINDS] == [
        KINDS[paint.kind] for paint in SPAN_PAINTS if paint.kind in KINDS
    ]


def test_activities_have_distinct_paints() -> None:
    assert [paint.activity for paint in ACTIVITIES] == list(ACTIVITY_CODES)
    assert set(ACTIVITY_CODES) == set(Activity)
    assert len({(paint.color, paint.form) for paint in ACTIVITIES}) == len(ACTIVITIES)


@pytest.mark.parametrize(("first", "second", "ratio"), [("#FFFFFF", "#000000", 21), ("#767676", "#FFFFFF", 4.54)])
def test_contrast(first: str, second: str, ratio: float) -> None:
    assert contrast(first, second) == contrast(second, first) == pytest.approx(ratio, abs=0.01)


def test_both_themes_have_the_same_colours_in_css() -> None:
    blocks = re.findall(r"\{\n((?:  --axon-[\w-]+: #\w{6};\n)+)\}", palette_css())
    names = [re.findall(r"--axon-([\w-]+):", block) for block in blocks]
    assert len(names) == 3, "light, dark, and dark where the page does not say"
    assert names[0] == names[1] == names[2]
    assert {f"kind-{kind}" for kind in KINDS} | {f"role-{role}" for role in ROLES} <= set(names[0])


def test_colours_are_in_the_palette_only() -> None:
    found = []
    for path in sorted(STATIC.rglob("*.*s")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if re.search(r"#[0-9a-fA-F]{6}\b|#[0-9a-fA-F]{3}\b(?=[;\"\s])", line):
                found.append(f"{path.relative_to(STATIC)}:{number}: {line.strip()}")
    ink = [line for line in found if line.startswith("shared/theme.js")]
    assert len(ink) <= 1, "black and white of words on colours"
    assert found == ink


def test_style_sheets_use_colours_that_exist() -> None:
    known = set(re.findall(r"--axon-([\w-]+):", palette_css()))
    for path in STATIC.rglob("*.css"):
        known |= set(re.findall(r"--axon-([\w-]+):", path.read_text(encoding="utf-8")))
    for path in STATIC.rglob("*.css"):
        text = path.read_text(encoding="utf-8")
        used = set(re.findall(r"var\(--axon-([\w-]+)", text))
        assert used - known - {"row"} == set(), path.name


@pytest.mark.parametrize("paint", [*SPAN_PAINTS, *ACTIVITIES], ids=lambda paint: paint.label)
def test_pictures_have_the_colours_for_both_pages(paint: SpanPaint | ActivityPaint) -> None:
    swatch = span_swatch(paint) if isinstance(paint, SpanPaint) else activity_swatch(paint)
    assert paint.color.both in swatch


@pytest.mark.parametrize("role", FORM_ROLES)
def test_roles_have_the_colours_for_both_pages(role: str) -> None:
    assert ROLES[role].both in role_swatch(role)


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
