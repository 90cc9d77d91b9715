"""Sessions of notebooks and their settings: how values are written, checked and shown, and what two sessions share."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axon_nb.cluster.launch.placement import plan_layout
from axon_nb.cluster.session import current
from axon_nb.cluster.session.current import NotebookSession
from axon_nb.cluster.settings import LiveSettings, Settings, Value, byte_count, seconds
from axon_nb.errors import ClusterLostError, NoClusterError, UsageError


class Running:
    """What settings see of a running cluster."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.taken: list[dict[str, Value]] = []

    def apply_settings(self, changed: Mapping[str, Value]) -> None:
        self.taken.append(dict(changed))
        self.settings = Settings(**{**vars(self.settings), **changed})


def started(**values: Any) -> tuple[LiveSettings, Running]:
    """The settings of a notebook, and the cluster that it started with them."""
    own = LiveSettings(**values)
    cluster = Running(own.snapshot())
    own.running = lambda: cluster
    return own, cluster


@pytest.mark.parametrize(
    ("text", "value", "shown"),
    [
        ("5", 5.0, "5 s"),
        ("5s", 5.0, "5 s"),
        ("0.5 s", 0.5, "0.5 s"),
        ("250ms", 0.25, "0.25 s"),
        ("2min", 120.0, "120 s"),
        (" 2 MIN ", 120.0, "120 s"),
        ("1h", 3600.0, "3600 s"),
        ("1.5h", 5400.0, "5400 s"),
        ("30d", 2592000.0, "2592000 s"),
    ],
)
def test_seconds(text: str, value: float, shown: str) -> None:
    assert seconds().read("x", text) == value
    assert seconds().show(value) == shown


@pytest.mark.parametrize(
    ("text", "value", "shown"),
    [
        ("65536", 65536, "64 KiB"),
        ("1MiB", 1 << 20, "1 MiB"),
        ("1.5 mib", 3 << 19, "1.5 MiB"),
        ("4GiB", 4 << 30, "4 GiB"),
        ("2MB", 2_000_000, "2000000 B"),
        ("1500 B", 1500, "1500 B"),
    ],
)
def test_bytes(text: str, value: int, shown: str) -> None:
    assert byte_count(1).read("x", text) == value
    assert byte_count(1).show(value) == shown


@given(st.integers(1, 1 << 40))
def test_formatted_bytes_round_trip(value: int) -> None:
    assert byte_count(1).read("x", byte_count(1).show(value)) == value


@given(st.floats(0, 1e9))
def test_formatted_seconds_round_trip(value: float) -> None:
    assert seconds().read("x", value) == pytest.approx(value, abs=1e-15)
    if value == 0 or value > 1e-4:
        assert seconds().read("x", seconds().show(value)) == value


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        ("keep_alive=x", "keep_alive must be a number of seconds, such as 300 or 5min; got 'x'."),
        ("keep_alive=", "keep_alive must be a number of seconds, such as 300 or 5min; got ''."),
        ("keep_alive=-1", "keep_alive must be a number of seconds, such as 300 or 5min; got '-1'."),
        ("keep_alive=5MiB", "keep_alive must be a number of seconds, such as 300 or 5min; got '5MiB'."),
        ("keep_alive=nan", "keep_alive must be a number of seconds, such as 300 or 5min; got 'nan'."),
        ("keep_alive=99999999d", "keep_alive must be at most 1000000000 s; got '99999999d'."),
        (
            "collective_timeout=0",
            "collective_timeout must be a number of seconds of at least 1, such as 300 or 5min; got '0'.",
        ),
        (
            "output_limit=5min",
            "output_limit must be a number of bytes of at least 1024, such as 65536 or 4MiB; got '5min'.",
        ),
        (
            "threads=1.5",
            "threads must be a whole number of threads per rank, such as 2, or 0 to share the cores evenly; got '1.5'.",
        ),
        ("threads=5000", "threads must be at most 4096; got '5000'."),
        (
            "group_memory=5",
            "group_memory must be a number of bytes of at least 1048576, such as 4MiB, or 0 for the default; got '5'.",
        ),
        ("group_memory=2000GiB", "group_memory must be at most 1024 GiB; got '2000GiB'."),
        ("debug=maybe", "debug must be on or off; got 'maybe'."),
        ("keepalive=5", "%distributed config has no setting 'keepalive': did you mean keep_alive?"),
        ("keep_alive", "%distributed config takes key=value, such as keep_alive=300s; got 'keep_alive'."),
        (
            "colour=red",
            "%distributed config has no setting 'colour': run `%distributed config` to see all, with what they do.",
        ),
        ("keepalive 5", "%distributed config has no setting 'keepalive': did you mean keep_alive?"),
    ],
)
def test_bad_input_is_one_sentence_and_changes_nothing(assignment: str, sentence: str) -> None:
    own, cluster = started()
    for before in ([], ["auto_repair=on keep_alive=7"]):
        with pytest.raises(UsageError) as raised:
            own.set(*before, assignment)
        assert str(raised.value) == sentence
    assert own.snapshot() == Settings()
    assert cluster.taken == []


def test_setting_line_without_a_cluster_shows_only_the_value() -> None:
    own = LiveSettings()
    assert own.set("group_memory=4MiB group_memory=0") == ["group_memory = 0 B"]
    assert own.set("keep_alive=5 output_limit = 2 MiB threads=2", "debug=off") == [
        "keep_alive = 5 s",
        "output_limit = 2 MiB",
        "threads = 2",
        "debug = off",
    ]
    assert own.snapshot() == Settings(keep_alive=5.0, output_limit=2 << 20, threads=2, debug=False)


def test_setting_line_with_a_cluster_says_when_it_takes_effect() -> None:
    own, cluster = started()
    assert own.set("keep_alive=5 output_limit=2MiB auto_repair=on start_timeout=60") == [
        "keep_alive = 5 s (in effect now)",
        "output_limit = 2 MiB (from the next cell)",
        "auto_repair = on (in effect now)",
        "start_timeout = 60 s (from the next start)",
    ]
    assert cluster.taken == [{"keep_alive": 5.0, "output_limit": 2 << 20}]
    assert own.set("collective_timeout=1min") == [
        "collective_timeout = 60 s (from the next start; this cluster keeps 1800 s)"
    ]
    assert cluster.settings.collective_timeout == 1800.0
    assert own.set("collective_timeout=30min") == ["collective_timeout = 1800 s (in effect now)"]


def test_list_marks_values_differing_from_default_or_cluster() -> None:
    own, _ = started(keep_alive=60.0)
    own.set("threads=2")
    assert own.lines() == [
        "keep_alive = 60 s (default 300 s)",
        "idle_stop = 0 s",
        "warm_up = on",
        "output_limit = 1 MiB",
        "collective_timeout = 1800 s",
        "threads = 2 (from the next start; this cluster keeps 0; default 0)",
        "group_memory = 0 B",
        "share = off",
        "auto_repair = off",
        "undo_memory = 64 MiB",
        "log_to = off",
        "protect = off",
        "watch_numbers = off",
        "debug = on",
        "start_timeout = 120 s",
    ]
    assert own.assignments()[:3] == ["keep_alive=60s", "idle_stop=0s", "warm_up=on"]


def test_typed_values_are_checked_like_text() -> None:
    own, cluster = started()
    own.keep_alive = 7
    own.set(output_limit=4096, threads=3, debug=False)
    assert cluster.taken == [{"keep_alive": 7.0}, {"output_limit": 4096}]
    assert (own.keep_alive, own.output_limit, own.threads, own.debug) == (7.0, 4096, 3, False)
    for wrong in (-1, float("nan"), float("inf"), True, None, "x"):
        with pytest.raises(UsageError, match="keep_alive must be a number of seconds"):
            own.keep_alive = wrong  # type: ignore[assignment]
    assert own.keep_alive == 7.0


def test_configuration_file_sets_defaults() -> None:
    own = LiveSettings()
    own.set("threads=2")
    own.configure({"keep_alive": "10min", "threads": 8, "debug": False})
    assert own.snapshot() == Settings(keep_alive=600.0, threads=2, debug=False)
    for section, sentence in {
        ("keepalive", 5): "%distributed config has no setting 'keepalive': did you mean keep_alive?",
        ("debug", "maybe"): "debug must be on or off; got 'maybe'.",
    }.items():
        with pytest.raises(UsageError) as raised:
            own.configure({"keep_alive": 1, **dict([section])})
        assert str(raised.value) == f"c.AxonNB in IPython's configuration: {sentence}"
    assert own.keep_alive == 600.0
    assert own.inherit({"keep_alive": 60.0}).keep_alive == 60.0
    assert own.keep_alive == 60.0


def test_unreachable_cluster_changes_no_setting() -> None:
    own, cluster = started()

    def gone(changed: Mapping[str, Value]) -> None:
        raise ClusterLostError("gone")

    cluster.apply_settings = gone  # type: ignore[method-assign]
    with pytest.raises(ClusterLostError):
        own.set("debug=off keep_alive=5")
    assert own.snapshot() == Settings()


def test_attach_inherits_settings_not_set_locally() -> None:
    own = LiveSettings()
    own.set("keep_alive=9 threads=4")
    kept = {"keep_alive": 60.0, "output_limit": 4096, "collective_timeout": 30.0, "threads": 1}
    cluster = Running(own.inherit(kept))
    own.running = lambda: cluster
    own.apply_again()
    assert cluster.taken == [{"keep_alive": 9.0}]
    assert own.lines()[:6] == [
        "keep_alive = 9 s (default 300 s)",
        "idle_stop = 0 s",
        "warm_up = on",
        "output_limit = 4 KiB (default 1 MiB)",
        "collective_timeout = 30 s (default 1800 s)",
        "threads = 4 (from the next start; this cluster keeps 1; default 0)",
    ]


@pytest.mark.parametrize(
    ("text", "value", "shown"), [("on", 1, "on"), ("off", 0, "off"), ("10", 10, "10"), (True, 1, "on")]
)
def test_protection_is_on_off_or_every_so_many_steps(text: object, value: int, shown: str) -> None:
    own, _ = started()
    own.set(protect=text)
    assert (own.protect, own.shown("protect")) == (value, shown)


@pytest.mark.parametrize(
    ("text", "value", "shown"), [("on", "on", "on"), ("off", "", "off"), ("stop", "stop", "stop"), (True, "on", "on")]
)
def test_watch_of_numbers_is_on_off_or_stop(text: object, value: str, shown: str) -> None:
    own, _ = started()
    own.set(watch_numbers=text)
    assert (own.watch_numbers, own.shown("watch_numbers")) == (value, shown)
    with pytest.raises(UsageError, match=re.escape("watch_numbers must be off, on or stop; got 'sometimes'.")):
        own.set("watch_numbers=sometimes")


def test_protection_refuses_what_is_no_number_of_steps() -> None:
    own, _ = started()
    message = "protect must be on, off, or a number such as 10: every tenth optimizer step; got 'sometimes'."
    with pytest.raises(UsageError, match=re.escape(message)):
        own.set("protect=sometimes")


def test_list_says_what_each_setting_does() -> None:
    lines = LiveSettings().described()
    assert lines[0].startswith("keep_alive = 300 s ")
    assert "threads = 0" in lines[5]
    assert lines[5].endswith("  torch's threads per rank; 0: its share of cores")
    assert len(lines) == len(Settings.known())
    assert max(map(len, lines)) <= 120


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
