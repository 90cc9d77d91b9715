"""The store of a cluster: its framing, its seals, and what it keeps."""

from __future__ import annotations

import contextlib
import math
import socket
import struct
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axon_nb.engine.groups.store import AgentStore
from axon_nb.host.connections import NONCE_SIZE, PROOF_SIZE, Handshake, MessageSigner, authenticate, store_key
from axon_nb.host.store import MAX_MESSAGE, Decoder, StoreServer, encode, receive
from axon_nb.records.protocol.agent import ServeStore
from tests.support.agents import Served, serve

KEYS = st.sampled_from([b"a", b"b", b"ab", b"abc", b"c/1", b""])
VALUES = st.one_of(st.binary(max_size=4), st.integers(-5, 5).map(lambda n: b"%d" % n))

OPERATIONS = st.one_of(
    st.tuples(st.just(b"set"), st.lists(st.tuples(KEYS, VALUES), min_size=1, max_size=3)),
    st.tuples(st.just(b"add"), KEYS, st.integers(-100, 100)),
    st.tuples(st.just(b"compare_set"), KEYS, VALUES, VALUES),
    st.tuples(st.just(b"append"), KEYS, VALUES),
    st.tuples(st.just(b"delete"), KEYS),
    st.tuples(st.just(b"delete_prefix"), KEYS),
    st.tuples(st.just(b"check"), st.lists(KEYS, max_size=3)),
    st.tuples(st.just(b"count")),
    st.tuples(st.just(b"wait"), st.lists(KEYS, max_size=3)),
)

MESSAGES = st.lists(st.lists(st.binary(max_size=40), max_size=5), max_size=6)

KEY = store_key(b"the cluster's key")
SEALED_MESSAGES = st.lists(st.lists(st.binary(max_size=30), max_size=4), min_size=1, max_size=4)


def message(operation: tuple[Any, ...]) -> list[bytes]:
    """Encode the operation as a client would."""
    match operation:
        case (b"set", pairs):
            return [b"set", *(item for pair in pairs for item in pair)]
        case (b"add", key, amount):
            return [b"add", key, b"%d" % amount]
        case (b"check", keys):
            return [b"check", *keys]
        case (b"wait", keys):
            return [b"wait", b"60000", *keys]
    return list(operation)


def apply(table: dict[bytes, bytes], operation: tuple[Any, ...]) -> list[bytes] | None:
    """Apply the operation to a plain dictionary and return its reply; None if it waits."""
    match operation:
        case (b"set", pairs):
            table.update(pairs)
            return [b""]
        case (b"add", key, amount):
            table[key] = b"%d" % (int(table.get(key, b"0")) + amount)
            return [table[key]]
        case (b"compare_set", key, expected, desired):
            if table.get(key, b"") == expected if key in table else not expected:
                table[key] = desired
            return [table.get(key, expected)]
        case (b"append", key, value):
            table[key] = table.get(key, b"") + value
            return [b""]
        case (b"delete", key):
            return [b"1" if table.pop(key, None) is not None else b"0"]
        case (b"delete_prefix", prefix):
            doomed = [key for key in table if key.startswith(prefix)]
            for key in doomed:
                del table[key]
            return [b"%d" % len(doomed)]
        case (b"check", keys):
            return [b"1" if set(keys) <= set(table) else b"0"]
        case (b"count",):
            return [b"%d" % len(table)]
        case (b"wait", keys):
            return [table[key] for key in keys] if set(keys) <= set(table) else None
    raise AssertionError(operation)


@settings(max_examples=300, deadline=None)
@given(st.lists(OPERATIONS, max_size=30))
def test_store_matches_a_dictionary_and_each_wait_ends_once(operations: list[tuple[Any, ...]]) -> None:
    store, table = StoreServer(), dict[bytes, bytes]()
    answers: dict[int, list[bytes]] = {}
    waiting: dict[int, list[bytes]] = {}

    def reply_to(number: int) -> Any:
        def reply(parts: list[bytes], /) -> None:
            assert number not in answers, "answered twice"
            answers[number] = parts

        return reply

    for number, operation in enumerate(operations):
        try:
            expected = apply(table, operation)
        except ValueError:  # add to a non-number
            with pytest.raises(ValueError, match="invalid literal"):
                store.handle(message(operation), reply_to(number))
            continue
        store.handle(message(operation), reply_to(number))
        if expected is None:
            waiting[number] = operation[1]
        else:
            assert answers[number] == expected, operation
        for other, keys in list(waiting.items()):
            if set(keys) <= set(table):
                assert answers[other] == [table[key] for key in keys]
                del waiting[other]
        assert not answers.keys() & waiting.keys()
    assert store.expire(math.inf) is None
    assert all(answers[number] == [] for number in waiting)


def test_expired_wait_gets_an_empty_reply() -> None:
    store, answers = StoreServer(), list[list[bytes]]()
    before = time.monotonic()
    store.handle([b"wait", b"50", b"never"], answers.append)
    after = time.monotonic()
    due = store.expire(before)
    assert due is not None
    assert before + 0.049 <= due <= after + 0.051
    assert not answers
    assert store.expire(due) is None
    assert answers == [[]]


def test_earliest_wait_determines_the_next_deadline() -> None:
    store, before = StoreServer(), time.monotonic()
    for limit in (b"90000", b"1000", b"5000"):
        store.handle([b"wait", limit, b"never"], lambda parts: None)
    after = time.monotonic()
    due = store.expire(before)
    assert due is not None
    assert before + 0.999 <= due <= after + 1.001


def test_unknown_request_gets_an_empty_reply_without_effect() -> None:
    store, answers = StoreServer(), list[list[bytes]]()
    store.handle([b"format", b"everything"], answers.append)
    store.handle([b"count"], answers.append)
    assert answers == [[], [b"0"]]


@settings(max_examples=200, deadline=None)
@given(MESSAGES, st.lists(st.integers(1, 30), min_size=1, max_size=20))
def test_messages_survive_any_fragmentation(messages: list[list[bytes]], sizes: list[int]) -> None:
    stream = b"".join(map(encode, messages))
    decoder, got, at, turn = Decoder(), list[list[bytes]](), 0, 0
    while at < len(stream):
        size = sizes[turn % len(sizes)]
        got += decoder.feed(stream[at : at + size])
        at, turn = at + size, turn + 1
    assert got == messages


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_garbage_raises_value_error_or_is_incomplete(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        Decoder().feed(data)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(struct.pack("<II", 0, 1), id="a part that is not there"),
        pytest.param(struct.pack("<III", 4, 1, 9), id="a part longer than the message"),
        pytest.param(struct.pack("<III", 4, 0, 0), id="bytes that belong to no part"),
        pytest.param(struct.pack("<II", MAX_MESSAGE + 1, 1), id="above the limit"),
    ],
)
def test_invalid_message_raises_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="store message"):
        Decoder().feed(data)


def test_receive_reads_one_message_and_leaves_the_next() -> None:
    one, two = socket.socketpair()
    with one, two:
        first, second = [b"x" * 3_000_000, b""], [b"next"]
        sender = threading.Thread(target=one.sendall, args=(encode(first) + encode(second),))
        sender.start()
        assert receive(two) == first
        assert receive(two) == second
        sender.join()


def test_receive_reports_a_closed_connection() -> None:
    one, two = socket.socketpair()
    with two:
        one.sendall(encode([b"whole"]) + encode([b"cut short"])[:-2])
        one.close()
        assert receive(two) == [b"whole"]
        with pytest.raises(ConnectionError, match="closed the connection"):
            receive(two)


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


@given(messages=SEALED_MESSAGES)
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
