"""Horovod's documented values, each on every rank of a mock world and of real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from axon_nb.comm import World
from tests.compat.documented import CASES


@pytest.fixture(scope="module")
def values(world: Any) -> list[list[Any]]:
    """What all calls gave, by rank."""

    def work(world: World) -> list[Any]:
        from axon_nb.compat import horovod as hvd
        from tests.compat.documented import run

        hvd.shutdown()
        assert not hvd.is_initialized()
        hvd.init()
        hvd.init()  # changes nothing
        return run(world.rank(), world.world_size())

    return world.run(work)


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: CASES[number].sentence[:60])
def test_documented_value(values: list[list[Any]], number: int) -> None:
    case = CASES[number]
    for rank, seen in enumerate(values):
        expected = case.expected(rank, len(values))
        assert_same(seen[number], expected)


def assert_same(seen: Any, expected: Any) -> None:
    """Compare values, tensors within what the order of adding changes."""
    if isinstance(seen, Exception):
        raise seen
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(seen, expected, rtol=1e-6, atol=1e-6)
    elif isinstance(expected, list | tuple):
        assert type(seen) is type(expected)
        assert len(seen) == len(expected), (seen, expected)
        for one, other in zip(seen, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, float):
        assert seen == pytest.approx(expected)
    else:
        assert seen == expected
