"""Drawn values that `%push`, `%pull`, `%scatter` and `%gather` move over real ranks: unchanged, or refused."""

from __future__ import annotations

import pytest

from tests.support.kernel import Kernel


def _check(kernel: Kernel, seeds: range) -> None:
    load = f"from tests.support.cases import round_trips as v_trips\nv_seeds = {seeds!r}"
    kernel.ok(f"%%distributed --ranks 0,1\n{load}\nglobals().update(v_trips.prepare(rank, v_seeds))")
    kernel.ok(f"{load}\nv_found = v_trips.wrong(v_seeds)", timeout=200)
    assert kernel.value("v_found") == {}
    kernel.ok("%%rank 1\nv_pushed = v_trips.wrongly_pushed(globals(), v_seeds)")
    kernel.ok("%pull v_pushed --ranks 1 --force")
    differing, count = kernel.value("v_pushed")
    assert differing == {}
    assert count > 0.8 * len(seeds)
    forget = "for v_name in [name for name in globals() if name.startswith('v_')]: del globals()[v_name]"
    kernel.ok(forget)
    kernel.ok(f"%%distributed --ranks 0,1\n{forget}")


def test_drawn_values_come_back_unchanged_or_are_refused(kernel: Kernel) -> None:
    _check(kernel, range(20))


@pytest.mark.slow
def test_200_drawn_values_come_back_unchanged_or_are_refused(kernel: Kernel) -> None:
    for first in range(20, 220, 50):
        _check(kernel, range(first, first + 50))
