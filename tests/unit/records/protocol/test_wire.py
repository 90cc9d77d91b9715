"""Records on the wire: each comes back as it was, and one that does not fit is refused with a sentence."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from axon_nb._version import __version__
from axon_nb.records.protocol.cells import CellFacts, Measurement
from axon_nb.records.protocol.wire import PROTOCOL, Packed, ProtocolError, decode, encode
from axon_nb.records.telemetry import Activity, RankState


@dataclass(frozen=True)
class Inner:
    count: int
    name: str = ""


@dataclass(frozen=True)
class Outer:
    inner: Inner
    rows: tuple[Inner, ...]
    by_rank: Mapping[int, tuple[str, int] | None]
    data: bytes
    share: float
    parts: int | tuple[int, ...]
    activity: Activity
    is_on: bool = True
    maybe: Inner | None = None
    packed: Packed = None


OUTER = Outer(
    inner=Inner(1, "größte"),
    rows=(Inner(2), Inner(3, "x")),
    by_rank={0: ("a", 1), 12: None},
    data=b"\x00\xff",
    share=2.5,
    parts=(1, 2),
    activity=Activity.WAITING,
    maybe=Inner(4),
    packed=[[1, "a"], [2, "b"]],
)


def through_json(content: Any) -> Any:
    return json.loads(json.dumps(content, allow_nan=False))


def test_records_round_trip() -> None:
    assert decode(Outer, through_json(encode(OUTER))) == OUTER


@pytest.mark.parametrize("number", [math.inf, -math.inf, 1.5, 3])
def test_non_finite_numbers_round_trip_through_json(number: float) -> None:
    content = {**encode(OUTER), "share": encode(number, float)}
    assert decode(Outer, through_json(content)).share == number
    assert math.isnan(decode(float, through_json(encode(math.nan, float))))


def test_foreign_number_types_become_python_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    assert encode(Inner(numpy.int64(3))) == {"count": 3, "name": ""}
    assert type(encode(numpy.float32(0.5), float)) is float
    assert type(encode(1e3, int)) is int
    for wrong in (1.5, math.inf, math.nan, True):
        with pytest.raises(ProtocolError, match="must be a whole number"):
            encode(wrong, int)


def test_defaults_may_be_left_out() -> None:
    assert decode(Inner, {"count": 1}) == Inner(1)
    assert decode(CellFacts, {}) == CellFacts(measurement=Measurement())


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"inner": {"count": "1"}}, r"Outer\.inner\.count: must be a whole number; got '1'\."),
        ({"inner": {"count": True}}, r"Outer\.inner\.count: must be a whole number; got True\."),
        ({"rows": [{"count": 1}, {"count": None}]}, r"Outer\.rows\.count: must be a whole number; got None\."),
        ({"rows": "abc"}, r"Outer\.rows: must be a list; got 'abc'\."),
        ({"by_rank": {"0": ["a"]}}, r"Outer\.by_rank: must be a row of 2; got \['a'\]\."),
        ({"by_rank": {"x": None}}, r"Outer\.by_rank: must be a mapping with whole numbers as keys"),
        ({"data": "?"}, r"Outer\.data: must be base64; got '\?'\."),
        ({"share": "much"}, r"Outer\.share: must be a number; got 'much'\."),
        ({"parts": "many"}, r"Outer\.parts: must be int \| tuple\[int, \.\.\.\]; got 'many'\."),
        ({"activity": "asleep"}, r"Outer\.activity: must be idle or running"),
        ({"more": 1, "and": 2}, r"Outer has no field 'and', 'more'\."),
        ({"maybe": {"name": "x"}}, r"Outer\.maybe lacks 'count'\."),
    ],
)
def test_mismatched_record_is_rejected_by_name(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(ProtocolError, match=says) as refused:
        decode(Outer, {**through_json(encode(OUTER)), **changed})
    assert f"This process runs axon_nb {__version__} (protocol {PROTOCOL})." in str(refused.value)


def test_invalid_value_is_rejected_before_sending() -> None:
    wrong: Any = "4"
    with pytest.raises(ProtocolError, match=r"^RankState\.line: must be a whole number; got '4'\.$"):
        encode(RankState(0, Activity.IDLE, 1, line=wrong))
    with pytest.raises(ProtocolError, match="a mapping with keys of int"):
        encode({"0": 1}, Mapping[int, int])
    with pytest.raises(ProtocolError, match="must be a Inner; got 1"):
        encode(1, Inner)


def test_long_value_is_truncated_in_the_message() -> None:
    with pytest.raises(ProtocolError) as refused:
        decode(Inner, {"count": "9" * 10_000})
    assert len(str(refused.value)) < 200


def test_record_with_unsupported_field_type_raises() -> None:
    @dataclass
    class Odd:
        value: set[int]

    with pytest.raises((TypeError, NameError)):
        encode(Odd({1}))
