"""The wire format: records as plain values (what JSON has), checked on both sides; kinds of messages; the version.

A coder is built from the type hints of a record on first use and kept, so that encoding costs some 0.1 µs per field.
Both directions check: a value of another type, an unknown field and a missing field are errors that name the field.

A record with ``OMITS_DEFAULTS`` encodes only the fields that differ from their defaults: one goes with every cell.

Supported are numbers (those that are not finite as text, which JSON needs), text, `bytes` (as base64), enums of text,
None, unions, tuples, lists, mappings with keys of text or whole numbers, records within records, and `Packed`.

Requests are answered by busy ranks, too; events are what ranks send; calls are for idle ranks. A request is a frozen
dataclass that names its reply: ``class StatusRequest(Request[RankState])``. The notebook sends it with
`RankClient.request` and gets an `Answer[RankState]`; the rank looks the handler up by the class. A call names a
function of the engine besides, and runs on the rank's main thread between two cells, or as a cell.

Raise `PROTOCOL` with every change of a record in this room: a field that is added, removed or means something else.
Records carry no version of their own. The two sides compare it once, when ranks join and when a notebook attaches, and
refuse each other if it differs.
"""

from __future__ import annotations

import base64
import binascii
import enum
import importlib
import math
import numbers
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, Union

from axon_nb._version import __version__
from axon_nb.errors import AxonError

Packed = Any
"""Bulk data in a form of its own, such as rows of spans: passed on unchecked."""
_NOT_FINITE = ("inf", "-inf", "nan")
R_co = TypeVar("R_co", covariant=True)
REPLY = "axon_reply"
"""Message type of a reply that holds the record."""
REFUSAL = "axon_refusal"
"""Message type of a reply that refuses the request; holds the reason."""
FAILURE = "axon_failed"
"""Message type of a reply to a request whose handler raised; holds the exception."""
PROTOCOL = 15
"""The version that this code speaks."""


def encode(value: Any, kind: Any = None) -> Any:
    """Encode a record as a dictionary that JSON takes, or a value of another type likewise.

    Args:
        value: The record.
        kind: The type that it must have, as in an annotation; None: its own.

    Raises:
        ProtocolError: it, or a field of it, has another type than declared.
    """
    kind = type(value) if kind is None else kind
    try:
        return _coder(kind).encode(value)
    except _Mismatch as error:
        raise ProtocolError(f"{_name(kind)}{error}") from None


def decode(kind: Any, content: Any) -> Any:
    """Decode a record of `kind`, or a value of another type, from what `encode` made.

    Raises:
        ProtocolError: a field is unknown, missing or of another type.
    """
    try:
        return _coder(kind).decode(content)
    except _Mismatch as error:
        raise ProtocolError(f"{_name(kind)}{error} This process runs {own_version()}.") from None


def _name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)


class _Mismatch(Exception):
    """A value that does not fit; its text continues after the place, which grows outward."""

    def within(self, place: str) -> _Mismatch:
        return _Mismatch(f"{place}{self}")


class _Coder(NamedTuple):
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def _wrong(expected: str, value: Any) -> _Mismatch:
    text = repr(value)
    return _Mismatch(f": must be {expected}; got {text if len(text) <= 60 else f'{text[:60]}…'}.")


def _same(value: Any) -> Any:
    return value


_ANYTHING = _Coder(_same, _same)


def _plain(kind: type, name: str, *, but: type | None = None) -> _Coder:
    def code(value: Any) -> Any:
        if isinstance(value, kind) and (but is None or not isinstance(value, but)):
            return value
        raise _wrong(name, value)

    return _Coder(code, code)


def _encode_int(value: Any) -> int:
    if type(value) is int:
        return value
    number: Any = value if isinstance(value, numbers.Real) else math.nan
    if isinstance(value, bool) or number % 1 != 0:
        raise _wrong("a whole number", value)
    return int(number)  # such as one of NumPy's, or a user's `total=1e3`


def _encode_float(value: Any) -> float | str:
    if not isinstance(value, bool) and isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else str(number)
    raise _wrong("a number", value)


def _decode_float(value: Any) -> float:
    if (isinstance(value, (int, float)) and not isinstance(value, bool)) or value in _NOT_FINITE:
        return float(value)
    raise _wrong("a number", value)


def _encode_bytes(value: Any) -> str:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return base64.b64encode(value).decode()
    raise _wrong("bytes", value)


def _decode_bytes(value: Any) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise _wrong("base64", value) from None


_coders: dict[Any, _Coder] = {
    Any: _ANYTHING,
    bool: _plain(bool, "True or False"),
    bytes: _Coder(_encode_bytes, _decode_bytes),
    float: _Coder(_encode_float, _decode_float),
    int: _Coder(_encode_int, _plain(int, "a whole number", but=bool).decode),
    str: _plain(str, "text"),
    types.NoneType: _plain(types.NoneType, "None"),
    None: _plain(types.NoneType, "None"),
}
"""By type hint; those of other types are added on first use."""


def _coder(kind: Any) -> _Coder:
    """The coder of a type hint.

    Raises:
        TypeError: records cannot hold such values; a mistake in a record of ours.
    """
    if kind not in _coders:
        _coders[kind] = _made(kind)
    return _coders[kind]


def _made(kind: Any) -> _Coder:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        return _union([_coder(argument) for argument in arguments], str(kind))
    if origin is tuple and arguments[-1:] != (...,):
        return _row([_coder(argument) for argument in arguments])
    if origin in (tuple, list, Sequence):
        return _items(_coder(arguments[0]), list if origin is list else tuple)
    if origin in (dict, Mapping):
        return _mapping(arguments[0], _coder(arguments[1]))
    if isinstance(kind, type) and issubclass(kind, enum.StrEnum):
        return _enum(kind)
    if isinstance(kind, type) and is_dataclass(kind):
        return _record(kind)
    raise TypeError(f"a record cannot hold {kind!r}")


def _union(coders: Sequence[_Coder], name: str) -> _Coder:
    def over(codes: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
        def code(value: Any) -> Any:
            for code in codes:
                try:
                    return code(value)
                except _Mismatch:
                    continue
            raise _wrong(name, value)

        return code

    none = _coders[types.NoneType]
    if len(coders) == 2 and none in coders:  # by far the most, and the error names the inner field
        inner = coders[0] if coders[1] is none else coders[1]
        return _Coder(
            lambda value: None if value is None else inner.encode(value),
            lambda value: None if value is None else inner.decode(value),
        )
    return _Coder(over([coder.encode for coder in coders]), over([coder.decode for coder in coders]))


def _row(coders: Sequence[_Coder]) -> _Coder:
    size = len(coders)

    def run(value: Any, codes: Sequence[Callable[[Any], Any]]) -> list[Any]:
        if not isinstance(value, (tuple, list)) or len(value) != size:
            raise _wrong(f"a row of {size}", value)
        return [code(item) for code, item in zip(codes, value, strict=True)]

    encoders, decoders = [coder.encode for coder in coders], [coder.decode for coder in coders]
    return _Coder(lambda value: run(value, encoders), lambda value: tuple(run(value, decoders)))


def _items(coder: _Coder, kind: type) -> _Coder:
    def run(value: Any, code: Callable[[Any], Any]) -> list[Any]:
        if not isinstance(value, (tuple, list)):
            raise _wrong("a list", value)
        return list(value) if code is _same else [code(item) for item in value]

    if kind is list and coder is _ANYTHING:
        return _plain(list, "a list")  # without a copy
    return _Coder(lambda value: run(value, coder.encode), lambda value: kind(run(value, coder.decode)))


def _mapping(key: Any, coder: _Coder) -> _Coder:
    if key not in (str, int):
        raise TypeError(f"keys of a mapping must be str or int; got {key!r}")
    if key is str and coder is _ANYTHING:
        return _plain(Mapping, "a mapping")
    number = key is int

    def encode_mapping(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise _wrong("a mapping", value)
        if not all(isinstance(name, key) for name in value):
            raise _wrong(f"a mapping with keys of {key.__name__}", value)
        return {str(name): coder.encode(item) for name, item in value.items()}

    def decode_mapping(value: Any) -> dict[Any, Any]:
        if not isinstance(value, Mapping):
            raise _wrong("a mapping", value)
        try:
            return {int(name) if number else name: coder.decode(item) for name, item in value.items()}
        except ValueError:
            raise _wrong("a mapping with whole numbers as keys", value) from None

    return _Coder(encode_mapping, decode_mapping)


def _enum(kind: type[enum.StrEnum]) -> _Coder:
    def decode_member(value: Any) -> enum.StrEnum:
        try:
            return kind(value)
        except ValueError:
            raise _wrong(" or ".join(kind), value) from None

    return _Coder(lambda value: str(decode_member(value)), decode_member)


def _defaults(kind: Any) -> dict[str, Any]:
    found = {item.name: item.default for item in fields(kind) if item.default is not MISSING}
    return found | {item.name: item.default_factory() for item in fields(kind) if item.default_factory is not MISSING}


def _record(kind: Any) -> _Coder:
    hints = typing.get_type_hints(kind)
    coders = {item.name: _coder(hints[item.name]) for item in fields(kind)}
    defaults = _defaults(kind) if getattr(kind, "OMITS_DEFAULTS", False) else {}
    needed = {item.name for item in fields(kind) if item.default is MISSING and item.default_factory is MISSING}
    encoders = [(name, coder.encode) for name, coder in coders.items()]
    decoders = {name: coder.decode for name, coder in coders.items()}

    def encode_record(record: Any) -> dict[str, Any]:
        if type(record) is not kind:
            raise _wrong(f"a {kind.__name__}", record)
        content, name = {}, ""
        try:
            for name, code in encoders:
                value = getattr(record, name)
                if name not in defaults or value != defaults[name]:
                    content[name] = code(value)
        except _Mismatch as error:
            raise error.within(f".{name}") from None
        return content

    def decode_record(content: Any) -> Any:
        if not isinstance(content, Mapping):
            raise _wrong(f"the fields of a {kind.__name__}", content)
        values, name = {}, ""
        try:
            for name, value in content.items():
                values[name] = decoders[name](value)
        except KeyError:
            unknown = sorted(map(repr, content.keys() - decoders.keys()))
            raise _Mismatch(f" has no field {', '.join(unknown)}.") from None
        except _Mismatch as error:
            raise error.within(f".{name}") from None
        if len(values) < len(decoders) and not values.keys() >= needed:
            raise _Mismatch(f" lacks {', '.join(map(repr, sorted(needed - values.keys())))}.")
        return kind(**values)

    return _Coder(encode_record, decode_record)


class Request(Generic[R_co]):
    """A request on a rank's control channel, which replies even if the main thread is busy or stuck."""

    __slots__ = ()


class Event:
    """A message that a rank sends unasked."""

    __slots__ = ()


class RankCall(Generic[R_co]):
    """A function of the engine that the notebook calls on a rank; the fields are its arguments, by name."""

    __slots__ = ()
    target: ClassVar[str]
    """The function, as ``module:name``."""


@dataclass(frozen=True, slots=True)
class Expression:
    """An argument of a call in a cell that the cell evaluates."""

    source: str
    """Python."""


def message_type(kind: type[Request[Any] | Event]) -> str:
    """The Jupyter message type of a request or an event: ``axon_status`` for `StatusRequest`."""
    return f"axon_{kind.__name__.removesuffix('Request').removesuffix('Event').lower()}"


def reply_type(kind: type[Request[Any] | RankCall[Any]]) -> Any:
    """The reply that `kind` declares; `NoneType` if it has no content."""
    for base in getattr(kind, "__orig_bases__", ()):
        if typing.get_origin(base) in (Request, RankCall):
            return typing.get_args(base)[0]
    raise TypeError(f"{kind.__name__} does not declare its reply: derive it from Request[…] or RankCall[…]")


def encode_reply(kind: type[Request[Any]], reply: Any) -> dict[str, Any]:
    """Encode what a handler returned for a request of `kind`.

    Raises:
        ProtocolError: it is not what the request declares.
    """
    content: dict[str, Any] = encode(reply, reply_type(kind)) or {}
    return content


def decode_reply(kind: type[Request[R_co]], content: Mapping[str, Any]) -> R_co:
    """Decode the reply to a request of `kind`.

    Raises:
        ProtocolError: it is not what the request declares.
    """
    expected = reply_type(kind)
    return decode(expected, None if expected is type(None) else content)  # type: ignore[no-any-return]


def arguments_of(call: RankCall[Any]) -> dict[str, Any]:
    """The arguments of a call, by name, after a check of their types.

    Raises:
        ProtocolError: one has another type than the call declares.
    """
    encode(call, type(call))
    return {item.name: getattr(call, item.name) for item in fields(call)}  # type: ignore[arg-type]


def perform(kind: type[RankCall[Any]], arguments: dict[str, Any]) -> Any:
    """On a rank: check the arguments, call the function and check what it returns.

    Raises:
        ProtocolError: one of them has another type than the call declares.
    """
    module, _, name = kind.target.partition(":")
    result = getattr(importlib.import_module(module), name)(**arguments_of(kind(**arguments)))
    encode(result, reply_type(kind))
    return result


def cell_source(call: RankCall[Any]) -> str:
    """Python source of one expression that makes the call. As a cell, a death or an interrupt ends it as any other.

    Raises:
        ProtocolError: an argument has another type than the call declares, or no Python literal stands for it.
    """
    module, _, name = call.target.partition(":")
    arguments = ", ".join(f"{field}={_literal(value)}" for field, value in arguments_of(call).items())
    return f"__import__({module!r}, fromlist=[{name!r}]).{name}({arguments})"


def is_call_source(code: str) -> bool:
    """Whether a cell is a call that `cell_source` has written."""
    return code.startswith("__import__('axon_nb.")


def _literal(value: Any) -> str:
    if isinstance(value, Expression):
        return value.source
    if value is None or type(value) in (bool, int, float, str, bytes):
        return repr(value)
    if type(value) is dict:
        return "{" + ", ".join(f"{_literal(key)}: {_literal(item)}" for key, item in value.items()) + "}"
    if type(value) is list:
        return "[" + ", ".join(map(_literal, value)) + "]"
    if isinstance(value, tuple):  # a named one arrives as a plain tuple
        return "(" + "".join(f"{_literal(item)}, " for item in value) + ")"
    raise ProtocolError(f"No Python literal stands for {type(value).__name__}, so it cannot travel in a cell.")


@dataclass(frozen=True, slots=True)
class Version:
    """The versions of one side."""

    package: str
    """Version of axon_nb; empty if unknown."""
    protocol: int
    """Version of the protocol; 0 for an axon_nb that had no number yet."""

    def __str__(self) -> str:
        package = f"axon_nb {self.package}" if self.package else "an older axon_nb"
        return f"{package} (protocol {self.protocol})" if self.protocol else package


def own_version() -> Version:
    """Return the versions of this process."""
    return Version(__version__, PROTOCOL)


def read_version(fields: Mapping[str, Any] | None) -> Version:
    """Read the version that another process reported; one that reported none speaks protocol 0."""
    if not isinstance(fields, Mapping):
        return Version("", 0)
    package, protocol = fields.get("package"), fields.get("protocol")
    return Version(package if isinstance(package, str) else "", protocol if isinstance(protocol, int) else 0)


def refuse_attach(name: str, theirs: Version) -> str:
    """Why a notebook cannot attach to a running cluster, with the fix; empty if both speak the same protocol.

    Args:
        name: The cluster's name.
        theirs: What its ranks run.
    """
    ours = own_version()
    if theirs.protocol == ours.protocol:
        return ""
    install = f"install axon_nb {theirs.package}" if theirs.package else "install the axon_nb that started them"
    return (
        f"The ranks of {name!r} run {theirs}, but this notebook has {ours}. Run `%distributed start` to start new "
        f"ranks. To keep these, {install} here, restart the kernel and attach again."
    )


def refuse_join(rank: int, host: str, theirs: Version) -> str:
    """Why a rank cannot join, with the fix; empty if both sides speak the same protocol.

    Args:
        rank: The rank.
        host: Where it runs.
        theirs: What it runs.
    """
    ours = own_version()
    if theirs.protocol == ours.protocol:
        return ""
    return (
        f"Rank {rank} on {host} runs {theirs}, but this notebook has {ours}. Install axon_nb {ours.package} on every "
        "host, then run `%distributed start`."
    )


def refuse_host(name: str, theirs: Version) -> str:
    """Why a host's agent cannot join the cluster, with the fix; empty if both sides speak the same protocol."""
    own = own_version()
    if theirs.protocol == own.protocol:
        return ""
    return (
        f"The host {name!r} runs {theirs}, but the notebook has {own}. Install axon_nb {own.package} on every host, "
        "then run `%distributed start`."
    )


class ProtocolError(AxonError, RuntimeError):
    """A message lacks a field of its record or has an invalid one, or the other side failed to answer."""
