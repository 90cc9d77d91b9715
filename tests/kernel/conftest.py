"""Kernels for the tests: one with a cluster of 4 ranks for all that leave it as it was, fresh ones for the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.kernel import PROBE_S, FreshCluster, Kernel


@pytest.fixture(scope="session")
def shared_kernel() -> Iterator[Kernel]:
    """A kernel with 4 ranks, for all tests of the session."""
    with Kernel() as kernel:
        kernel.load_and_warm_up()
        kernel.ok("%distributed start -n 4 --name shared")
        yield kernel
        _stop_cluster(kernel)


@pytest.fixture
def kernel(shared_kernel: Kernel) -> Kernel:
    """The shared kernel, with 4 ranks that answer."""
    reply = shared_kernel.run("%%distributed\n1", timeout=PROBE_S)
    if not reply.ok:
        shared_kernel.ok("%distributed restart")
    return shared_kernel


@pytest.fixture(scope="session")
def kernel_for_clusters() -> Iterator[Kernel]:
    """A kernel in which tests start clusters of their own, which is faster than a kernel for each."""
    with Kernel() as kernel:
        kernel.ok("%load_ext axon_nb")
        yield kernel


@pytest.fixture
def fresh_cluster(kernel_for_clusters: Kernel) -> Iterator[FreshCluster]:
    """Start a cluster for one test; it ends with the test, whatever state its ranks are in."""
    kernel = kernel_for_clusters

    def start(n: int) -> Kernel:
        kernel.ok(f"%distributed config auto_repair=off\n%distributed start -n {n}")
        return kernel

    yield start
    _stop_cluster(kernel)


def _stop_cluster(kernel: Kernel) -> None:
    try:
        kernel.run("%distributed stop", timeout=60)
    except TimeoutError:  # the test passed and left a cell running
        kernel.come_back()
        kernel.ok("%load_ext axon_nb\n%distributed attach\n%distributed stop")


@pytest.fixture
def new_kernel(tmp_path: Path) -> Iterator[Callable[..., Kernel]]:
    """Makes kernels of the test's own, without a cluster."""
    made: list[Kernel] = []

    def make(**env: str) -> Kernel:
        fresh = Kernel(cwd=tmp_path, env=env)
        made.append(fresh)
        return fresh

    yield make
    for fresh in made:
        fresh.__exit__(None, None, None)
