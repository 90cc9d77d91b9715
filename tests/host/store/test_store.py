"""The store server compared with a plain dictionary."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axon_nb.host.store import StoreServer

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
