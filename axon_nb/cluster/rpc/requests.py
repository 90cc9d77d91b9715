"""Send requests to ranks: over the control channel, which replies even if the main thread is stuck, or as calls.

A call runs a function on a rank by its name: ipyparallel's `apply`, without importing the rank's side here.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any

from axon_nb.cluster.rpc.client import RankClient
from axon_nb.records.waits import PendingCall, RankWaits

__all__ = ["call", "read_waits", "request_all", "request_each", "request_waits"]


def request_all(
    client: RankClient, ranks: Iterable[int], msg_type: str, *, timeout_s: float, **content: Any
) -> dict[int, dict[str, Any]]:
    """Send one control request to all `ranks`; return the replies of those that reply within `timeout_s` seconds."""
    return request_each(client, dict.fromkeys(ranks, content), msg_type, timeout_s=timeout_s)


def request_each(
    client: RankClient, contents: Mapping[int, Mapping[str, Any]], msg_type: str, *, timeout_s: float
) -> dict[int, dict[str, Any]]:
    """Send a control request with its own content to each rank; return the replies as `request_all` does."""
    futures = {}
    for rank, content in contents.items():
        with contextlib.suppress(KeyError):  # unregistered meanwhile
            futures[rank] = client.request(rank, msg_type, **content)
    end = time.monotonic() + timeout_s
    replies = {}
    for rank, future in futures.items():
        if future.wait(max(0.0, end - time.monotonic())):
            reply = future.result()["content"]
            if "error" not in reply:
                replies[rank] = reply
    return replies


def request_waits(client: RankClient, ranks: Iterable[int], *, timeout_s: float = 1.0) -> dict[int, RankWaits]:
    """Return what each rank waits in; ranks that do not reply within `timeout_s` seconds are left out."""
    replies = request_all(client, ranks, "axon_waits", timeout_s=timeout_s)
    return {rank: read_waits(reply) for rank, reply in replies.items()}


def read_waits(reply: dict[str, Any]) -> RankWaits:
    """Return the record in a rank's reply to ``axon_waits``; other fields are ignored."""
    pending = tuple(PendingCall(**{**call, "ranks": tuple(call["ranks"])}) for call in reply["pending"])
    names = ("rank", "running", "line", "call", "counts", "via", "waited")
    fields = {name: reply[name] for name in names if name in reply}
    return RankWaits(**fields, pending=pending, threads=tuple(reply.get("threads", ())))


def _invoke(target: str, arguments: dict[str, Any]) -> Any:
    import importlib

    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)(**arguments)


def call(client: RankClient, rank: int, target: str, /, **arguments: Any) -> Future[Any]:
    """Call `target` (``module:function``) on one rank once its main thread is free; return a future of the result."""
    view = client.direct_view(rank)
    result: Future[Any] = view.apply_async(_invoke, target, arguments)
    return result
