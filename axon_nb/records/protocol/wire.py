"""The wire format: records as plain values (what JSON has), checked on both sides; kinds of messages; the version.

msgspec checks both directions: a value of another type and a missing field are errors that name the field, and so is an
unknown field of a message. A record with ``omit_defaults`` encodes only what differs from its defaults: one goes with
every cell.

Records hold numbers, text, `bytes` (as base64), enums of text, None, unions, tuples, lists, mappings with keys of text
or whole numbers, records within records, and `Packed`.

Requests are answered by busy ranks, too; events are what ranks send; calls are for idle ranks. A request is a
`Struct` that names its reply: ``class StatusRequest(Request[RankState])``. The notebook sends it with
`RankClient.request` and gets an `Answer[RankState]`; the rank looks the handler up by the class. A call names a
function of the engine besides, and runs on the rank's main thread between two cells, or as a cell.

Raise `PROTOCOL` with every change of a record in this room: a field that is added, removed or means something else.
Records carry no version of their own. The two sides compare it once, when ranks join and when a notebook attaches, and
refuse each other if it differs.
"""

from __future__ import annotations

import importlib
import json
import numbers
import typing
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
from msgspec import Struct

from axon_nb._version import __version__
from axon_nb.errors import AxonError

Packed = Any
"""Bulk data in a form of its own, such as rows of spans: passed on unchecked."""
_json = json.JSONEncoder()
R_co = TypeVar("R_co", covariant=True)
REPLY = "axon_reply"
"""Message type of a reply that holds the record."""
REFUSAL = "axon_refusal"
"""Message type of a reply that refuses the request; holds the reason."""
FAILURE = "axon_failed"
"""Message type of a reply to a request whose handler raised; holds the exception."""
PROTOCOL = 18
"""The version that this code speaks."""


def encode(value: Any, kind: Any = None) -> Any:
    """Encode a record as a dictionary of what JSON has, or a value of another type likewise.

    Args:
        value: The record.
        kind: The type that it must have, as in an annotation; None: its own.

    Raises:
        ProtocolError: it, or a field of it, has another type than declared.
    """
    kind = type(value) if kind is None else kind
    try:
        content = msgspec.to_builtins(value, str_keys=True, enc_hook=_plain)
        msgspec.convert(content, kind, str_keys=True)
    except (msgspec.ValidationError, TypeError) as error:
        raise ProtocolError(f"{_name(kind)}: {error}.") from None
    return content


def decode(kind: Any, content: Any) -> Any:
    """Decode a record of `kind`, or a value of another type, from what `encode` made.

    Raises:
        ProtocolError: a field is missing or of another type, or a message has one that its record lacks.
    """
    try:
        return msgspec.convert(content, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"{_name(kind)}: {error}. This process runs {own_version()}.") from None


def pack(content: Mapping[str, Any]) -> bytes:
    """The content of a Jupyter message, which Jupyter then sends as it is: its own packers know no NaN."""
    return _json.encode(content).encode()


def unpack(part: bytes) -> Any:
    """Unpack a part of a Jupyter message: what JSON has, NaN and infinities included."""
    try:
        return msgspec.json.decode(part)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return json.loads(part.decode("utf-8", "replace"))


def _plain(value: Any) -> Any:
    # Values of other types that users pass, such as numbers of NumPy.
    plain: Any
    for kind, plain in ((numbers.Integral, int), (numbers.Real, float), (str, str), (Mapping, dict), (Sequence, list)):
        if isinstance(value, kind):
            return plain(value)
    raise TypeError(f"a record cannot hold {value!r:.60}")


def _name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else "message"


class Request(Struct, Generic[R_co], frozen=True, forbid_unknown_fields=True):
    """A request on a rank's control channel, which replies even if the main thread is busy or stuck."""


class Event(Struct, frozen=True, forbid_unknown_fields=True):
    """A message that a rank sends unasked."""


class RankCall(Struct, Generic[R_co], frozen=True, forbid_unknown_fields=True):
    """A function of the engine that the notebook calls on a rank; the fields are its arguments, by name."""

    target: ClassVar[str]
    """The function, as ``module:name``."""


class Expression(Struct, frozen=True):
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
    arguments = msgspec.structs.asdict(call)
    _check(arguments, type(call))
    return arguments


def perform(kind: type[RankCall[Any]], arguments: dict[str, Any]) -> Any:
    """On a rank: check the arguments, call the function and check what it returns.

    Raises:
        ProtocolError: one of them has another type than the call declares.
    """
    module, _, name = kind.target.partition(":")
    result = getattr(importlib.import_module(module), name)(**arguments_of(kind(**arguments)))
    _check(result, reply_type(kind))
    return result


def _check(value: Any, kind: Any) -> None:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"{_name(kind)}: {error}.") from None


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


class Version(Struct, frozen=True):
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


def refuse_join(who: str, theirs: Version) -> str:
    """Why a rank or the agent of a host cannot join, with the fix; empty if both sides speak the same protocol.

    Args:
        who: Starts the sentence, such as ``Rank 3 on node7``.
        theirs: What it runs.
    """
    ours = own_version()
    if theirs.protocol == ours.protocol:
        return ""
    return (
        f"{who} runs {theirs}, but the notebook has {ours}. Install axon_nb {ours.package} on every host, then run "
        "`%distributed start`."
    )


class ProtocolError(AxonError, RuntimeError):
    """A message lacks a field of its record or has an invalid one, or the other side failed to answer."""
