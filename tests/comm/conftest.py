"""Mock and Gloo worlds, for tests that run on both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from axon_nb.comm import World
from tests.comm.gloo import GlooWorld


@pytest.fixture(scope="session")
def gloo_world() -> Iterator[GlooWorld]:
    """Four processes."""
    with GlooWorld(4, backend="gloo") as world:
        yield world


@pytest.fixture(scope="session")
def shm_world() -> Iterator[GlooWorld]:
    """Four processes over shared memory."""
    with GlooWorld(4, backend="shm") as world:
        yield world


@pytest.fixture(params=["mock", "gloo", "shm"])
def world(request: pytest.FixtureRequest) -> Any:
    """A world of four ranks with `run(fn)`."""
    return World.mock(4) if request.param == "mock" else request.getfixturevalue(f"{request.param}_world")
