"""The rendezvous store as ranks use it, against torch's own; and no interrupt makes it give a wrong answer."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from types import FrameType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed import DistStoreError

from axon_nb.engine.groups.store import AgentStore
from tests.support.agents import Served, serve

KEYS = st.sampled_from(["a", "b", "group/0"])
TEXTS = st.text("xyz", min_size=1, max_size=3)
OPERATIONS = st.one_of(
    st.tuples(st.just("set"), KEYS, TEXTS),
    st.tuples(st.just("append"), KEYS, TEXTS),
    st.tuples(st.just("compare_set"), KEYS, TEXTS | st.just(""), TEXTS),
    st.tuples(st.just("add"), st.just("count"), st.integers(-9, 9)),
    st.tuples(st.just("delete_key"), KEYS),
    st.tuples(st.just("check"), st.lists(KEYS, min_size=1, max_size=2)),
    st.tuples(st.just("multi_set"), st.just(["a", "b"]), st.lists(TEXTS, min_size=2, max_size=2)),
)


@pytest.fixture(scope="module")
def agent() -> Iterator[Served]:
    """A host agent that forks nothing."""
    served = serve(entry="", controller=[], owner="the tests")
    yield served
    served.end()


@pytest.fixture
def clients(agent: Served) -> Iterator[list[AgentStore]]:
    """Two clients of the agent's store, each with a connection of its own."""
    first = AgentStore(str(agent.run_dir.store_socket), timedelta(seconds=60))
    made = [first, first.clone()]
    yield made
    for client in made:
        client._sock.close()


@pytest.fixture
def store(clients: list[AgentStore]) -> AgentStore:
    """A client of the agent's store."""
    return clients[0]


_prefixes = iter(range(10**9))


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.lists(OPERATIONS, max_size=15))
def test_store_matches_torchs_store(store: AgentStore, operations: list[tuple[object, ...]]) -> None:
    ours, theirs = PrefixStore(f"t{next(_prefixes)}", store), PrefixStore("t", HashStore())
    for name, *args in operations:
        assert getattr(ours, str(name))(*args) == getattr(theirs, str(name))(*args), (name, args)
    for key in ("a", "b", "group/0"):
        assert ours.check([key]) == theirs.check([key])
        if theirs.check([key]):
            assert ours.get(key) == theirs.get(key)


def test_wait_ends_when_another_client_sets_the_key(clients: list[AgentStore]) -> None:
    got: list[bytes] = []
    waiter = threading.Thread(target=lambda: got.append(clients[1].get("t-later")))
    waiter.start()
    clients[0].set("t-later", "now")
    waiter.join(60)
    assert got == [b"now"]


def test_keys_can_be_counted_and_deleted_through_a_prefix(store: AgentStore) -> None:
    prefixed = PrefixStore("t-counted", store)
    before = prefixed.num_keys()
    prefixed.set("one", "1")
    assert prefixed.num_keys() == store.num_keys() == before + 1
    assert prefixed.delete_key("one") is True
    assert prefixed.delete_key("one") is False
    assert prefixed.num_keys() == before


def test_timed_out_wait_names_the_key(store: AgentStore) -> None:
    began = time.monotonic()
    with pytest.raises(DistStoreError, match=r"t-never"):
        store.wait(["t-never"], timedelta(seconds=0.2))
    assert time.monotonic() - began > 0.15


def test_large_values_arrive_whole(store: AgentStore) -> None:
    value = bytes(range(256)) * 20_000
    store.set("t-large", value)
    assert store.get("t-large") == value
    store.delete_key("t-large")


class Interrupted(Exception):
    """What the handler of these tests raises, as a rank's handler raises KeyboardInterrupt."""


class Interrupts:
    """Interrupts this thread within a millisecond or so after `armed` was set, once.

    The handler itself clears it: a signal that comes while the test leaves its loop is not to end the test.
    """

    armed = False

    def land(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        if self.armed:
            self.armed = False
            raise Interrupted


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    """Interrupts of the thread that runs the test."""
    main, made, over = threading.get_ident(), Interrupts(), threading.Event()

    def send() -> None:
        while not over.wait(0.0011):
            if made.armed:
                signal.pthread_kill(main, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, made.land)
    sender = threading.Thread(target=send)
    sender.start()
    yield made
    made.armed = False
    over.set()
    sender.join()
    signal.signal(signal.SIGUSR1, before)


def test_interrupted_request_leaves_no_stale_reply(store: AgentStore, interrupts: Interrupts) -> None:
    for number in range(20):
        store.set(f"t-key{number}", f"value{number}")
    for attempt in range(60):
        with contextlib.suppress(Interrupted):
            interrupts.armed = True
            while True:
                store.get(f"t-key{attempt % 20}")
        for number in (attempt % 20, (attempt + 7) % 20):
            assert store.get(f"t-key{number}") == f"value{number}".encode()
        assert store.add("t-count", 1) == attempt + 1


SPLIT = """
import gc, sys
from datetime import timedelta
import torch, torch.distributed as dist
from torch.distributed import PrefixStore
from axon_nb.engine.groups.store import AgentStore

store = AgentStore(sys.argv[1], timedelta(seconds=60))
dist.init_process_group("gloo", store=PrefixStore("split/", store), rank=0, world_size=1)
part = dist.group.WORLD.split_group([0], timeout=timedelta(seconds=60), group_name="part")
gc.collect()
kept = part.get_group_store()
kept.set("key", "value")
assert kept.get("key") == b"value"
tensor = torch.ones(1)
part.allreduce([tensor]).wait()
assert tensor.item() == 1.0
dist.destroy_process_group()
print("works")
"""


def test_split_group_has_a_working_store(agent: Served) -> None:
    # In a process of its own: other tests replace torch's Gloo groups in this one.
    command = [sys.executable, "-W", "ignore", "-c", SPLIT, str(agent.run_dir.store_socket)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["works"], done.stderr
