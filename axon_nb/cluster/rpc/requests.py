"""Asking ranks what they wait in, over the control channel, which answers while the main thread is stuck.

Calling a function on a rank by its name: ipyparallel's `apply`, without importing the rank's side here.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any

from axon_nb.cluster.rpc.client import RankClient
from axon_nb.records.waits import PendingCall, RankWaits

__all__ = ["ask", "ask_each", "ask_waits", "call", "read_waits"]


def ask(
    client: RankClient, ranks: Iterable[int], msg_type: str, *, limit_s: float, **content: Any
) -> dict[int, dict[str, Any]]:
    """The ranks' answers to one control request; those that do not answer within `limit_s` seconds are left out."""
    return ask_each(client, dict.fromkeys(ranks, content), msg_type, limit_s=limit_s)


def ask_each(
    client: RankClient, contents: Mapping[int, Mapping[str, Any]], msg_type: str, *, limit_s: float
) -> dict[int, dict[str, Any]]:
    """As `ask`, with a content of its own for each rank."""
    futures = {}
    for rank, content in contents.items():
        with contextlib.suppress(KeyError):  # unregistered meanwhile
            futures[rank] = client.request(rank, msg_type, **content)
    end = time.monotonic() + limit_s
    answers = {}
    for rank, future in futures.items():
        if future.wait(max(0.0, end - time.monotonic())):
            answer = future.result()["content"]
            if "error" not in answer:
                answers[rank] = answer
    return answers


def ask_waits(client: RankClient, ranks: Iterable[int], *, limit_s: float = 1.0) -> dict[int, RankWaits]:
    """What each rank waits in; those that do not answer within `limit_s` seconds are left out."""
    answers = ask(client, ranks, "axon_waits", limit_s=limit_s)
    return {rank: read_waits(answer) for rank, answer in answers.items()}


def read_waits(answer: dict[str, Any]) -> RankWaits:
    """The record that a rank's answer to ``axon_waits`` holds; what else is in it is left out."""
    pending = tuple(PendingCall(**{**call, "ranks": tuple(call["ranks"])}) for call in answer["pending"])
    names = ("rank", "running", "line", "call", "counts", "via", "waited")
    told = {name: answer[name] for name in names if name in answer}
    return RankWaits(**told, pending=pending, threads=tuple(answer.get("threads", ())))


def _invoke(target: str, arguments: dict[str, Any]) -> Any:
    import importlib

    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)(**arguments)


def call(client: RankClient, rank: int, target: str, /, **arguments: Any) -> Future[Any]:
    """Call `target` (``module:function``) on one rank when its main thread is free; a future of the result."""
    view = client.direct_view(rank)
    result: Future[Any] = view.apply_async(_invoke, target, arguments)
    return result
