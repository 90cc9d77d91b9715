"""Sessions of notebooks: two of them in one process share nothing."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from axon_nb.cluster.launch.placement import plan_layout
from axon_nb.cluster.session import current
from axon_nb.cluster.session.current import NotebookSession
from axon_nb.cluster.settings import Settings, Value
from axon_nb.errors import NoClusterError


class RunningCluster:
    """What a session sees of a cluster."""

    def __init__(self, num_ranks: int) -> None:
        layout = plan_layout(num_ranks, devices="cpu", backend="gloo", threads=1)
        self.running = True
        self.applied: dict[str, Value] = {}
        self.state = SimpleNamespace(
            layout=layout, rank_info=(), settings=Settings(), apply_settings=self.applied.update
        )


@pytest.fixture
def clusters() -> Iterator[list[Any]]:
    """A cluster for each of two sessions."""
    clusters = [RunningCluster(2), RunningCluster(3)]
    yield clusters
    for cluster in clusters:
        cluster.running = False  # else the session stops it when this process ends


def test_each_session_has_its_own_cluster(clusters: list[Any]) -> None:
    first, second = NotebookSession(), NotebookSession()
    first.put(clusters[0])
    assert first.cluster is clusters[0]
    assert second.cluster is None
    with pytest.raises(NoClusterError):
        second.require("%push")
    second.put(clusters[1])
    assert (first.cluster, second.cluster) == tuple(clusters)
    first.drop(clusters[0])
    assert (first.cluster, second.cluster) == (None, clusters[1])


def test_each_session_has_its_own_settings(clusters: list[Any]) -> None:
    sessions = NotebookSession(), NotebookSession()
    for session, cluster in zip(sessions, clusters, strict=True):
        session.put(cluster)
    sessions[0].settings.set("keep_alive=5 debug=off")
    values: list[Mapping[str, Any]] = [vars(session.settings) for session in sessions]
    assert [(value["keep_alive"], value["debug"]) for value in values] == [(5.0, False), (300.0, True)]
    assert [cluster.applied for cluster in clusters] == [{"keep_alive": 5.0}, {}]


def test_each_session_has_its_own_history(clusters: list[Any]) -> None:
    first, second = NotebookSession(), NotebookSession()
    first.put(clusters[0])
    first.history.record_push({"x": 1}, [0, 1])
    assert second.history.entries() == (None, [])
    second.put(clusters[1])
    facts, entries = first.history.entries()
    assert facts is not None
    assert facts.num_ranks == 2
    assert [entry.names for entry in entries] == [("x",)]
    assert [session.history.sent_values({"x": 1}) for session in (first, second)] == [{"x": 1}, {}]


def test_interrupts_reach_cells_of_their_session() -> None:
    first, second = NotebookSession(), NotebookSession()
    with contextlib.suppress(KeyboardInterrupt), first.interrupts.capture() as outer:
        with contextlib.suppress(KeyboardInterrupt), second.interrupts.capture() as inner:
            signal.raise_signal(signal.SIGINT)
        assert (outer.count, inner.count) == (0, 1)
        signal.raise_signal(signal.SIGINT)
    assert (outer.count, inner.count) == (1, 1)


def test_user_functions_use_the_current_session(clusters: list[Any]) -> None:
    before, session = current.session(), NotebookSession()
    session.put(clusters[0])
    current.set_session(session)
    try:
        assert current.require("%push") is clusters[0]
    finally:
        current.set_session(before)
    assert current.session().cluster is not clusters[0]
