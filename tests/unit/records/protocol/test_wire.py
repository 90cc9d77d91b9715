"""Records on the wire: each comes back as it was, and one that does not fit is refused with a sentence."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from axon_nb._version import __version__
from axon_nb.records.protocol.cells import CellFacts, Measurement
from axon_nb.records.protocol.wire import PROTOCOL, Packed, ProtocolError, decode, encode, pack
from axon_nb.records.telemetry import Activity, RankState


class Inner(msgspec.Struct, frozen=True):
    count: int
    name: str = ""


class Outer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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
def test_non_finite_numbers_round_trip_through_a_message(number: float) -> None:
    content = {**encode(OUTER), "share": number}
    assert decode(Outer, json.loads(pack(content))).share == number
    assert math.isnan(decode(Outer, json.loads(pack({**content, "share": math.nan}))).share)


def test_foreign_number_types_become_python_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    assert encode(Inner(numpy.int64(3))) == {"count": 3, "name": ""}
    assert type(encode(numpy.float32(0.5), float)) is float
    for wrong in (1.5, math.inf, math.nan, True):
        with pytest.raises(ProtocolError, match="Expected `int`"):
            encode(wrong, int)


def test_defaults_may_be_left_out() -> None:
    assert decode(Inner, {"count": 1}) == Inner(1)
    assert decode(CellFacts, {}) == CellFacts(measurement=Measurement())


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"inner": {"count": "1"}}, r"Outer: Expected `int`, got `str` - at `\$\.inner\.count`\."),
        ({"inner": {"count": True}}, r"Outer: Expected `int`, got `bool` - at `\$\.inner\.count`\."),
        ({"rows": [{"count": 1}, {"count": None}]}, r"Outer: Expected `int`, got `null` - at `\$\.rows\[1\]\.count`\."),
        ({"rows": "abc"}, r"Outer: Expected `array`, got `str` - at `\$\.rows`\."),
        ({"by_rank": {"0": ["a"]}}, r"Outer: Expected `array` of length 2, got 1 - at `\$\.by_rank\[\.\.\.\]`\."),
        ({"by_rank": {"x": None}}, r"Outer: Expected `int`, got `str` - at `key` in `\$\.by_rank`"),
        ({"data": "?"}, r"Outer: Invalid base64 encoded string - at `\$\.data`\."),
        ({"share": "much"}, r"Outer: Expected `float`, got `str` - at `\$\.share`\."),
        ({"parts": "many"}, r"Outer: Expected `int \| array`, got `str` - at `\$\.parts`\."),
        ({"activity": "asleep"}, r"Outer: Invalid enum value 'asleep' - at `\$\.activity`\."),
        ({"more": 1}, r"Outer: Object contains unknown field `more`\."),
        ({"maybe": {"name": "x"}}, r"Outer: Object missing required field `count` - at `\$\.maybe`\."),
    ],
)
def test_mismatched_record_is_rejected_by_name(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(ProtocolError, match=says) as refused:
        decode(Outer, {**through_json(encode(OUTER)), **changed})
    assert f"This process runs axon_nb {__version__} (protocol {PROTOCOL})." in str(refused.value)


def test_invalid_value_is_rejected_before_sending() -> None:
    wrong: Any = "4"
    with pytest.raises(ProtocolError, match=r"^RankState: Expected `int \| null`, got `str` - at `\$\.line`\.$"):
        encode(RankState(0, Activity.IDLE, 1, line=wrong))
    with pytest.raises(ProtocolError, match="Inner: Expected `object`, got `int`"):
        encode(1, Inner)
    with pytest.raises(ProtocolError, match="Inner: a record cannot hold <object"):
        encode(Inner(object()))  # type: ignore[arg-type]
