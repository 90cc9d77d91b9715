"""What a view of many ranks costs the kernel grows with their number, not with its square."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.browser.bare.view_pages import SAMPLES

FEW, MANY = 16, 64
SLACK = 1.2
"""Of growth in step with the ranks."""


@pytest.mark.parametrize("name", SAMPLES)
def test_content_of_view_costs_no_more_for_each_of_many_ranks(name: str) -> None:
    make = SAMPLES[name][1]
    make(FEW)  # what is made once
    few, many = (_calls(make, ranks) for ranks in (FEW, MANY))
    assert many <= SLACK * MANY / FEW * few, f"{many:,} calls for {MANY} ranks, {few:,} for {FEW}"


def _calls(make: Any, ranks: int) -> int:
    count = 0

    def profile(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        make(ranks)
    finally:
        sys.setprofile(None)
    return count
