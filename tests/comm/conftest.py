"""Worlds of each backend, for tests that run on all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from axon_nb.comm import World
from tests.support.ranks import DeviceWorld, RankWorld


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


@pytest.fixture(scope="session")
def nccl_world() -> Iterator[DeviceWorld]:
    """Four processes over NCCL, each with a GPU."""
    if (count := torch.cuda.device_count()) < 4:
        pytest.skip(f"needs four GPUs, and there are {count}")
    with DeviceWorld(4) as world:
        yield world


@pytest.fixture(params=["mock", "gloo", "shm", pytest.param("nccl", marks=pytest.mark.gpu)])
def world(request: pytest.FixtureRequest) -> Any:
    """A world of four ranks with `run(fn)`."""
    return World.mock(4) if request.param == "mock" else request.getfixturevalue(f"{request.param}_world")
