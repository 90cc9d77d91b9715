"""Agents for the tests: real processes, each with its own folder, stopped afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from axon_nb.errors import ClusterLostError
from axon_nb.host.run_dir import RunDir
from tests.support.agents import ENTRY, Served, Shared, serve

MakeAgent = Callable[..., Served]


@pytest.fixture
def make_agent() -> Iterator[MakeAgent]:
    """Factory of agents for one test, stopped afterwards."""
    made: list[Served] = []

    def make(*, entry: str = "", controller: list[str] | None = None, owner: str = "the tests") -> Served:
        served = serve(entry=entry, controller=controller or [], owner=owner)
        made.append(served)
        return served

    yield make
    for served in made:
        with contextlib.suppress(ClusterLostError):
            served.end()


@pytest.fixture(scope="session")
def shared() -> Iterator[Shared]:
    """The agents that tests share."""
    shared = Shared()
    yield shared
    shared.end()


@pytest.fixture
def agent(shared: Shared) -> Served:
    """A shared agent that forks nothing, for tests that leave it unchanged."""
    return shared.get("")


@pytest.fixture
def forking_agent(shared: Shared) -> Served:
    """A shared agent that has imported torch and forks ranks; each test uses its own rank numbers."""
    return shared.get(ENTRY)


@pytest.fixture
def run_dir() -> Iterator[RunDir]:
    """The folder of a cluster that is not running yet."""
    run_dir = RunDir.create()
    yield run_dir
    run_dir.remove()
