"""Worlds for training: mock worlds of any size, and real processes of two and four ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from axon_nb.comm import World
from tests.support.ranks import RankWorld

WORLDS = ["mock-2", "mock-3", "mock-4", "gloo-2", "gloo-4"]


@pytest.fixture(scope="session")
def gloo_worlds() -> Iterator[dict[int, RankWorld]]:
    """Worlds of processes, started on demand."""
    made: dict[int, RankWorld] = {}
    yield made
    for world in made.values():
        world.end()


def make(name: str, gloo_worlds: dict[int, RankWorld]) -> Any:
    """Return a world by its name."""
    kind, _, size = name.partition("-")
    if kind == "mock":
        return World.mock(int(size))
    if int(size) not in gloo_worlds:
        gloo_worlds[int(size)] = RankWorld(int(size))
    return gloo_worlds[int(size)]


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest, gloo_worlds: dict[int, RankWorld]) -> Any:
    """A world of some ranks with `run(fn)`."""
    return make(request.param, gloo_worlds)


@pytest.fixture(params=["mock-2", "gloo-2"])
def two(request: pytest.FixtureRequest, gloo_worlds: dict[int, RankWorld]) -> Any:
    """A world of two ranks."""
    return make(request.param, gloo_worlds)


@pytest.fixture(params=["mock-4", "gloo-4"])
def four(request: pytest.FixtureRequest, gloo_worlds: dict[int, RankWorld]) -> Any:
    """A world of four ranks."""
    return make(request.param, gloo_worlds)


@pytest.fixture
def gloo(gloo_worlds: dict[int, RankWorld]) -> Any:
    """Create a world of this many processes."""
    return lambda size: make(f"gloo-{size}", gloo_worlds)
