"""The store's wire format: nothing is lost or invented, however the bytes arrive."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axon_nb.host.store import MAX_MESSAGE, Decoder, encode, receive

MESSAGES = st.lists(st.lists(st.binary(max_size=40), max_size=5), max_size=6)


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
        with pytest.raises(EOFError, match="closed the connection"):
            receive(two)
