"""Completions from what was known of a rank."""

from __future__ import annotations

import pytest

from axon_nb.cluster.inspection.completion import NameSnapshot
from axon_nb.records.protocol.cells import KnownName


@pytest.fixture
def snapshot() -> NameSnapshot:
    known = NameSnapshot()
    known.update(
        {
            "model": KnownName("Net", own=("head", "_hidden")),
            "table": KnownName("dict", keys=("'alpha'", '"it\'s"', "7")),
            "modes": KnownName(),
        },
        {"Net": ["forward", "half"], "dict": ["items"]},
    )
    return known


@pytest.mark.parametrize(
    ("before", "fragment", "found"),
    [
        ("mod", "mod", ["model", "modes"]),
        ("y = mode", "mode", ["model", "modes"]),
        ("model.h", "h", ["half", "head"]),
        ("f(model.f", "f", ["forward"]),
        ("model._h", "_h", ["_hidden"]),
        ("table['a", "a", ["alpha"]),
        ("table[", "", ["'alpha'", '"it\'s"', "7"]),
        ("table.it", "it", ["items"]),
        ("other.x", "x", []),
        ("model.head.x", "", []),
        ("print('mod", "", []),
        ("whil", "whil", ["while"]),
    ],
)
def test_snapshot_completions(snapshot: NameSnapshot, before: str, fragment: str, found: list[str]) -> None:
    assert snapshot.complete(before) == (fragment, found)


def test_no_completions_before_the_first_snapshot() -> None:
    assert not NameSnapshot()
    assert NameSnapshot().complete("zzz") == ("zzz", [])
