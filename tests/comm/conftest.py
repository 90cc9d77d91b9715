"""Mock and Gloo worlds, for tests that run on both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from axon_nb.comm import World
from tests.support.ranks import RankWorld


@pytest.fixture(scope="session")
def gloo_world() -> Iterator[RankWorld]:
    """Four processes."""
    with RankWorld(4, backend="gloo") as world:
        yield world


@pytest.fixture(scope="session")
def shm_world() -> Iterator[RankWorld]:
    """Four processes over shared memory."""
    with RankWorld(4, backend="shm") as world:
        yield world


@pytest.fixture(params=["mock", "gloo", "shm"])
def world(request: pytest.FixtureRequest) -> Any:
    """A world of four ranks with `run(fn)`."""
    return World.mock(4) if request.param == "mock" else request.getfixturevalue(f"{request.param}_world")
