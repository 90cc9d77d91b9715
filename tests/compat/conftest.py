"""Worlds for Horovod's API: three ranks as a mock and as real processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from axon_nb.comm import World
from tests.support.ranks import RankWorld


@pytest.fixture(scope="session")
def gloo_three() -> Iterator[RankWorld]:
    """Three processes."""
    with RankWorld(3) as world:
        yield world


@pytest.fixture(params=["mock", "gloo"], scope="module")
def world(request: pytest.FixtureRequest) -> Any:
    """A world of three ranks with `run(fn)`."""
    return World.mock(3) if request.param == "mock" else request.getfixturevalue("gloo_three")
