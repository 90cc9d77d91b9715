"""The kinds of messages: requests, which busy ranks answer, too; events that ranks send; calls, for idle ranks.

A request is a frozen dataclass that names its reply: ``class StatusRequest(Request[RankState])``. The notebook sends it
with `RankClient.request` and gets an `Answer[RankState]`; the rank looks the handler up by the class. A call names a
function of the engine besides, and runs on the rank's main thread between two cells, or as a cell.
"""

from __future__ import annotations

import importlib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic, TypeVar

from axon_nb.records.protocol.errors import ProtocolError
from axon_nb.records.protocol.wire import decode, encode

R_co = TypeVar("R_co", covariant=True)

REPLY = "axon_reply"
"""Message type of a reply that holds the record."""
REFUSAL = "axon_refusal"
"""Message type of a reply that refuses the request; holds the reason."""
FAILURE = "axon_failed"
"""Message type of a reply to a request whose handler raised; holds the exception."""


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
