"""The messages of the protocol, and their way over the wire."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import math
import pkgutil
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pytest

import axon_nb.records.protocol as room
from axon_nb._version import __version__
from axon_nb.records.protocol.agent import (
    AgentEvent,
    Closed,
    Command,
    ControllerExit,
    Exit,
    command_kind,
    command_name,
)
from axon_nb.records.protocol.cells import (
    KEY,
    AbortReply,
    AbortRequest,
    CellEnd,
    CellFacts,
    CellOutcome,
    Measurement,
    StopRequest,
    read_outcome,
)
from axon_nb.records.protocol.inspection import CaptureModel, DebuggerCommand, StatusRequest, TelemetryEvent
from axon_nb.records.protocol.recovery import DisableGroups
from axon_nb.records.protocol.transfer import Seed, SendValue
from axon_nb.records.protocol.wire import (
    PROTOCOL,
    Event,
    Expression,
    Packed,
    ProtocolError,
    RankCall,
    Request,
    Version,
    arguments_of,
    cell_source,
    decode,
    decode_reply,
    encode,
    encode_reply,
    message_type,
    own_version,
    pack,
    perform,
    read_version,
    refuse_attach,
    refuse_join,
    reply_type,
)
from axon_nb.records.telemetry import Activity, RankState


def kinds(base: type) -> Iterator[Any]:
    """The classes of the room that derive from `base`."""
    for module in pkgutil.iter_modules(room.__path__):
        for value in vars(importlib.import_module(f"{room.__name__}.{module.name}")).values():
            if isinstance(value, type) and issubclass(value, base) and value is not base:
                yield value


REQUESTS = sorted(set(kinds(Request)), key=lambda kind: kind.__name__)
CALLS = sorted(set(kinds(RankCall)), key=lambda kind: kind.__name__)


def test_request_names_are_unique() -> None:
    names = [message_type(kind) for kind in [*REQUESTS, *set(kinds(Event))]]
    assert len(set(names)) == len(names) > 15
    assert message_type(StatusRequest) == "axon_status"
    assert message_type(TelemetryEvent) == "axon_telemetry"


@pytest.mark.parametrize("kind", [*REQUESTS, *CALLS])
def test_each_message_is_frozen_and_declares_its_reply(kind: Any) -> None:
    assert kind.__struct_config__.frozen
    for declared in (kind, reply_type(kind)):
        msgspec.inspect.type_info(declared)  # each field has a type that can be encoded


@pytest.mark.parametrize("kind", sorted(set(kinds(Command)), key=lambda kind: kind.__name__))
def test_each_command_of_the_agent_is_found_by_its_name(kind: Any) -> None:
    assert command_kind(command_name(kind)) is kind
    assert command_kind([]) is command_kind("dance") is None
    msgspec.inspect.type_info(kind)


def test_agent_events_round_trip() -> None:
    exit_of_rank = Exit(rank=2, pid=7, code=-9, time_ns=5, out_of_memory=None, last_output="last words", crash="crash")
    for event in (exit_of_rank, ControllerExit(pid=7, code=1, time_ns=5), Closed()):
        assert decode(AgentEvent, json.loads(json.dumps(encode(event)))) == event
    with pytest.raises(ProtocolError, match="Invalid value 'party'"):
        decode(AgentEvent, {"event": "party"})


def test_cell_outcome_is_read_from_the_jupyter_reply() -> None:
    end = CellEnd(seconds=1.5, calls=2)
    failed = {"status": "error", "ename": "ValueError", "evalue": "x", "traceback": ["a", "b"], "payload": []}
    assert read_outcome({**failed, KEY: encode(end)}) == CellOutcome("error", "ValueError", "x", ("a", "b"), end)
    assert read_outcome({"status": "aborted"}) == CellOutcome("aborted", evalue="aborted")
    assert read_outcome({"status": "ok"}) == CellOutcome("ok")
    with pytest.raises(ProtocolError, match=r"CellEnd: Expected `float`, got `str` - at `\$\.seconds`"):
        read_outcome({"status": "ok", KEY: {"seconds": "soon"}})


@pytest.mark.parametrize("kind", CALLS)
def test_each_call_has_a_function_with_these_arguments(kind: Any) -> None:
    module, _, name = kind.target.partition(":")
    function = getattr(importlib.import_module(module), name)
    signature = inspect.signature(function)
    taken = {parameter.name for parameter in signature.parameters.values() if parameter.kind != parameter.VAR_KEYWORD}
    needed = {p.name for p in signature.parameters.values() if p.default is p.empty and p.kind != p.VAR_KEYWORD}
    given = set(kind.__struct_fields__)
    assert given <= taken, kind
    assert needed <= given, kind


def test_replies_are_validated_on_both_sides() -> None:
    reply = AbortReply(interrupted=True, pending=2, line=None)
    assert decode_reply(AbortRequest, encode_reply(AbortRequest, reply)) == reply
    assert encode_reply(StopRequest, None) == {}
    assert decode_reply(StopRequest, {}) is None
    with pytest.raises(ProtocolError, match="RankState: Object missing required field"):
        encode_reply(StatusRequest, reply)
    with pytest.raises(ProtocolError, match="RankState: Object missing required field `rank`"):
        decode_reply(StatusRequest, encode(reply))
    state = RankState(1, Activity.IDLE, 5)
    assert decode_reply(StatusRequest, encode_reply(StatusRequest, state)) == state


def test_call_arguments_are_validated_before_sending() -> None:
    wrong: Any = 7
    assert arguments_of(DisableGroups("rank 1 is dead")) == {"reason": "rank 1 is dead"}
    with pytest.raises(ProtocolError, match=r"DisableGroups: Expected `str`, got `int` - at `\$\.reason`"):
        arguments_of(DisableGroups(wrong))


def test_rank_validates_arguments_and_results() -> None:
    class Length(RankCall[str]):
        target = "builtins:len"

    with pytest.raises(ProtocolError, match=r"DisableGroups: .*\$\.reason"):
        perform(DisableGroups, {"reason": None})
    with pytest.raises(TypeError, match="reasons"):
        perform(DisableGroups, {"reasons": "x"})
    assert reply_type(Length) is str


def evaluated(source: str) -> tuple[str, dict[str, Any]]:
    """The function that a cell's source calls, and its arguments."""
    (statement,) = ast.parse(source).body
    assert isinstance(statement, ast.Expr)
    call = statement.value
    assert isinstance(call, ast.Call)
    assert not call.args
    given = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    return ast.unparse(call.func), given


def test_call_cell_has_literal_arguments() -> None:
    address = (("/memfd:a b", 3), ("/x", 0))
    call = SendValue("x['\"\\n']", {0: address, 2: None}, (0, 2), shards=True)
    function, given = evaluated(cell_source(call))
    assert function == "__import__('axon_nb.engine.transfer.variables', fromlist=['send_value']).send_value"
    assert given == arguments_of(call)
    assert evaluated(cell_source(DebuggerCommand("p 'x'; \\")))[1] == {"line": "p 'x'; \\"}
    assert "value=5, per_rank=False" in cell_source(Seed(5))


def test_expression_is_evaluated_by_the_cell() -> None:
    source = cell_source(CaptureModel(look=Expression("lambda: net"), name="net"))
    assert source.endswith("capture_or_reason(look=lambda: net, name='net')")


def test_arguments_without_a_literal_are_rejected() -> None:
    class Text(str):
        pass

    with pytest.raises(ProtocolError, match="No Python literal stands for Text"):
        cell_source(DebuggerCommand(Text("p x")))


def test_version_mismatch_is_rejected_with_fix() -> None:
    own = own_version()
    assert read_version(encode(own)) == own
    assert refuse_attach("demo", own) == ""
    assert refuse_join("Rank 1 on here", own) == ""
    newer = Version("9.9", PROTOCOL + 1)
    said = refuse_attach("demo", newer)
    assert said.startswith(f"The ranks of 'demo' run axon_nb 9.9 (protocol {PROTOCOL + 1}), but this notebook has ")
    assert "`%distributed start`" in said
    assert "install axon_nb 9.9 here" in said
    assert "Rank 3 on far runs axon_nb 9.9" in refuse_join("Rank 3 on far", newer)


@pytest.mark.parametrize("fields", [None, {}, {"package": 1, "protocol": "2"}])
def test_ranks_without_a_version_count_as_older(fields: Any) -> None:
    assert read_version(fields) == Version("", 0)
    assert "run an older axon_nb, but" in refuse_attach("demo", read_version(fields))


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
