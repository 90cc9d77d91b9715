"""The store over TCP: only clients with the key get in, and no message can be changed or replayed."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axon_nb.engine.groups.store import AgentStore
from axon_nb.host.connections import NONCE_SIZE, PROOF_SIZE, Handshake, MessageSigner, authenticate, store_key
from axon_nb.host.store import encode
from axon_nb.records.protocol.agent import ServeStore
from tests.support.agents import Served, serve

KEY = store_key(b"the cluster's key")
MESSAGES = st.lists(st.lists(st.binary(max_size=30), max_size=4), min_size=1, max_size=4)


def _ends() -> tuple[MessageSigner, MessageSigner]:
    """Signers of both ends of one authenticated connection: the rank's and the store's."""
    near, far = socket.socketpair()
    with near, far:
        near.settimeout(60)
        far.settimeout(60)
        handshake = Handshake(KEY)
        far.sendall(handshake.challenge)
        rank: list[MessageSigner] = []
        thread = threading.Thread(target=lambda: rank.append(authenticate(near, KEY)))
        thread.start()
        proof, store = handshake.check(far.recv(NONCE_SIZE + PROOF_SIZE))
        far.sendall(proof)
        thread.join(60)
        return rank[0], store


@given(messages=MESSAGES)
def test_messages_arrive_unchanged(messages: list[list[bytes]]) -> None:
    rank, store = _ends()
    assert [store.verify(rank.sign(parts)) for parts in messages] == messages
    assert [rank.verify(store.sign(parts)) for parts in messages] == messages


def test_tampered_message_is_rejected() -> None:
    rank, store = _ends()
    *parts, proof = rank.sign([b"set", b"key", b"1"])
    with pytest.raises(ValueError, match="wrong signature"):
        store.verify([b"set", b"key", b"2", proof])
    assert parts == [b"set", b"key", b"1"]


def test_replayed_or_reflected_message_is_rejected() -> None:
    rank, store = _ends()
    sent = rank.sign([b"add", b"count", b"1"])
    assert store.verify(sent) == [b"add", b"count", b"1"]
    with pytest.raises(ValueError, match="wrong signature"):
        store.verify(sent)
    with pytest.raises(ValueError, match="wrong signature"):
        rank.verify(sent)
    with pytest.raises(ValueError, match="wrong signature"):
        rank.verify([])


def test_both_ends_reject_a_handshake_with_another_key() -> None:
    with pytest.raises(ValueError, match="does not know the key"):
        Handshake(KEY).check(bytes(NONCE_SIZE + PROOF_SIZE))
    near, far = socket.socketpair()
    with near, far:
        far.sendall(bytes(NONCE_SIZE + PROOF_SIZE))
        with pytest.raises(ConnectionError, match="does not know the cluster's key"):
            authenticate(near, KEY)


@pytest.fixture(scope="module")
def agent() -> Iterator[tuple[Served, str]]:
    """A host agent that serves its store on loopback over TCP, and the address."""
    served = serve(entry="", controller=[], owner="the tests")
    port = served.client.call(ServeStore("127.0.0.1", KEY.hex())).port
    yield served, f"tcp:127.0.0.1:{port}"
    served.end()


def test_tcp_store_shares_the_same_data(agent: tuple[Served, str]) -> None:
    served, address = agent
    here = AgentStore(str(served.run_dir.store_socket), timedelta(seconds=60))
    there = AgentStore(address, timedelta(seconds=60), key=KEY)
    here.set("a", "1")
    assert there.get("a") == b"1"
    assert there.add("count", 2) == 2
    assert here.add("count", 3) == 5
    copy = there.clone()
    assert copy.multi_get(["a", "count"]) == [b"1", b"5"]
    assert (here.own_ip, there.own_ip) == ("127.0.0.1", "127.0.0.1")
    for client in (here, there, copy):
        client._sock.close()


def test_client_with_another_key_is_rejected(agent: tuple[Served, str]) -> None:
    with pytest.raises(ConnectionError):
        AgentStore(agent[1], key=store_key(b"another"))


@pytest.mark.parametrize(
    "garbage", [encode([b"set", b"stolen", b"1"]), bytes(64), bytes(4096), b"GET / HTTP/1.1\r\n\r\n" * 8]
)
def test_unauthenticated_clients_have_no_effect(agent: tuple[Served, str], garbage: bytes) -> None:
    _, address = agent
    ip, port = address.split(":")[1:]
    with socket.create_connection((ip, int(port)), 60) as sock, contextlib.suppress(ConnectionError):
        sock.settimeout(60)
        sock.sendall(garbage)
        if len(garbage) >= NONCE_SIZE + PROOF_SIZE:
            while sock.recv(1000):
                pass
    store = AgentStore(address, timedelta(seconds=60), key=KEY)
    assert not store.check(["stolen"])
    store._sock.close()
