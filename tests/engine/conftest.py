"""A kernel of these tests' own, with a cluster of 2 ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kernel import Kernel


@pytest.fixture(scope="session")
def own_kernel() -> Iterator[Kernel]:
    """A kernel with 2 ranks."""
    with Kernel() as kernel:
        kernel.ok("%load_ext axon_nb")
        kernel.ok("%distributed start -n 2 --name engine-tests --devices cpu")
        yield kernel
