"""Worlds for training: mock worlds of any size, and real processes of two and four ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from axon_nb.comm import World
from tests.support.ranks import RankWorld

WORLDS = ["mock-2", "mock-3", "mock-4", "ranks-2", "ranks-4"]


@pytest.fixture(scope="session")
def process_worlds() -> Iterator[dict[int, RankWorld]]:
    """Worlds of processes, started on demand."""
    made: dict[int, RankWorld] = {}
    yield made
    for world in made.values():
        world.end()


def make(name: str, process_worlds: dict[int, RankWorld]) -> Any:
    """Return a world by its name."""
    kind, _, size = name.partition("-")
    if kind == "mock":
        return World.mock(int(size))
    if int(size) not in process_worlds:
        process_worlds[int(size)] = RankWorld(int(size))
    return process_worlds[int(size)]


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest, process_worlds: dict[int, RankWorld]) -> Any:
    """A world of some ranks with `run(fn)`."""
    return make(request.param, process_worlds)


@pytest.fixture(params=["mock-2", "ranks-2"])
def two(request: pytest.FixtureRequest, process_worlds: dict[int, RankWorld]) -> Any:
    """A world of two ranks."""
    return make(request.param, process_worlds)


@pytest.fixture(params=["mock-4", "ranks-4"])
def four(request: pytest.FixtureRequest, process_worlds: dict[int, RankWorld]) -> Any:
    """A world of four ranks."""
    return make(request.param, process_worlds)


@pytest.fixture
def gloo(process_worlds: dict[int, RankWorld]) -> Any:
    """Create a world of this many processes."""
    return lambda size: make(f"ranks-{size}", process_worlds)
