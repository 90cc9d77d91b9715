"""The administrator's limit of ranks per user: what is started beyond it, and what the message names."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest

import axon_nb
from axon_nb.cluster.launch.placement import raise_if_over_quota
from axon_nb.errors import UsageError
from axon_nb.records.protocol.agent import ClusterFacts, SetInfo
from axon_nb.records.protocol.wire import own_version
from tests.support.agents import Served, serve


@pytest.fixture(scope="module")
def digits() -> Iterator[Served]:
    """A cluster called so that has four ranks, the only one of this user."""
    with tempfile.TemporaryDirectory(prefix="axon_nb-") as alone, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AXON_NB_RUNTIME_DIR", alone)
        served = serve(entry="", controller=[], owner="the tests")
        served.client.call(SetInfo(ClusterFacts("digits", 4, keep_alive_s=300.0, version=own_version())))
        yield served
        served.end()


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six ranks per user."""
    monkeypatch.setenv("AXON_NB_MAX_RANKS_PER_USER", "6")


@pytest.mark.usefixtures("limit")
def test_start_beyond_the_limit_names_the_clusters_that_can_be_stopped(digits: Served) -> None:
    raise_if_over_quota(2)
    with pytest.raises(UsageError) as refused:
        raise_if_over_quota(3)
    assert str(refused.value) == (
        "This host allows 6 ranks per user (AXON_NB_MAX_RANKS_PER_USER); got 3 besides 4 in other clusters: use 2 "
        "ranks at most, or stop 'digits' (4 ranks); `axon-nb list` shows them."
    )


@pytest.mark.usefixtures("limit")
def test_cluster_may_grow_up_to_the_limit(digits: Served) -> None:
    raise_if_over_quota(6, besides=digits.run_dir)
    with pytest.raises(UsageError, match=r"6 ranks per user \(.*\); got 7: use 6 ranks at most\.$"):
        raise_if_over_quota(7, besides=digits.run_dir)


def test_without_a_limit_any_number_starts(digits: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    raise_if_over_quota(10_000)
    monkeypatch.setenv("AXON_NB_MAX_RANKS_PER_USER", "many")
    with pytest.raises(UsageError, match="must be a number of ranks; got 'many'"):
        raise_if_over_quota(1)


@pytest.mark.usefixtures("digits", "limit")
def test_start_checks_the_limit_before_it_starts_anything() -> None:
    with pytest.raises(UsageError, match=r"got 8 besides 4 in other clusters"):
        axon_nb.start(8, devices="cpu")
