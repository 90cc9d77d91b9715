"""Every activity can be told from the others without its colour."""

from __future__ import annotations

import pytest

from axon_nb.records.telemetry import Activity
from axon_nb.widgets.palette import ACTIVITY_CODES, PAINTS, contrast, needs_outline


def test_every_activity_has_a_paint() -> None:
    assert [paint.activity for paint in PAINTS] == list(ACTIVITY_CODES)
    assert set(ACTIVITY_CODES) == set(Activity)


def test_paints_differ_by_more_than_colour() -> None:
    looks = [(paint.pattern, needs_outline(paint.color)) for paint in PAINTS if paint.activity is not Activity.DEAD]
    assert len(set(looks)) == len(looks), "a dead and a failed rank share the cross; the text beside tells them apart"


@pytest.mark.parametrize(("first", "second", "ratio"), [("#FFFFFF", "#000000", 21), ("#767676", "#FFFFFF", 4.54)])
def test_contrast(first: str, second: str, ratio: float) -> None:
    assert contrast(first, second) == contrast(second, first) == pytest.approx(ratio, abs=0.01)
