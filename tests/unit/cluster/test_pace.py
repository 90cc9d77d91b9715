"""How often ranks are asked follows from what their answers cost."""

from __future__ import annotations

import pytest

from axon_nb.cluster.pace import Pace


def test_what_costs_much_is_asked_more_seldom() -> None:
    pace = Pace(1.0)
    every = []
    for seconds in (0.05, 0.02, 0.001, 9.0, 9.0, 0.0):
        pace.took(seconds)
        every.append(pace.every_s)
    # One answer that costs more than those around it, such as the first, changes nothing.
    assert every == pytest.approx([1.0, 5.0, 1.0, 1.0, 10.0, 1.0])
