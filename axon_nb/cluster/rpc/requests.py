"""Asking ranks over the control channel, which answers while the main thread is stuck; calling their functions."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from axon_nb.cluster.rpc.answers import Answer, RefusedError
from axon_nb.cluster.rpc.client import RankClient
from axon_nb.records.protocol.errors import ProtocolError
from axon_nb.records.protocol.inspection import WaitsRequest
from axon_nb.records.protocol.messages import RankCall, Request, arguments_of, perform
from axon_nb.records.waits import RankWaits

__all__ = ["Answers", "ask", "ask_each", "ask_waits", "call"]

R = TypeVar("R")


class Answers(dict[int, R]):
    """Replies by rank; who has refused, or not answered, is not among them."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: dict[int, str] = {}
        """Why a rank has refused the request."""


def ask(client: RankClient, ranks: Iterable[int], request: Request[R], *, limit_s: float) -> Answers[R]:
    """The ranks' answers to one request; those that do not answer within `limit_s` seconds are left out."""
    return ask_each(client, dict.fromkeys(ranks, request), limit_s=limit_s)


def ask_each(client: RankClient, requests: Mapping[int, Request[R]], *, limit_s: float) -> Answers[R]:
    """As `ask`, with a request of its own for each rank."""
    asked: dict[int, Answer[R]] = {}
    for rank, request in requests.items():
        with contextlib.suppress(KeyError):  # unregistered meanwhile
            asked[rank] = client.request(rank, request)
    end = time.monotonic() + limit_s
    answers: Answers[R] = Answers()
    for rank, answer in asked.items():
        if answer.wait(max(0.0, end - time.monotonic())):
            try:
                answers[rank] = answer.result()
            except RefusedError as refusal:
                answers.refused[rank] = str(refusal)
            except ProtocolError:
                continue
    return answers


def ask_waits(client: RankClient, ranks: Iterable[int], *, limit_s: float = 1.0) -> dict[int, RankWaits]:
    """What each rank waits in; those that do not answer within `limit_s` seconds are left out."""
    answers = ask(client, ranks, WaitsRequest(), limit_s=limit_s)
    return {rank: answer.waits for rank, answer in answers.items()}


def call(client: RankClient, rank: int, wanted: RankCall[R]) -> Future[R]:
    """Call a function on one rank when its main thread is free; a future of the result."""
    result: Future[Any] = client.direct_view(rank).apply_async(perform, type(wanted), arguments_of(wanted))
    return result
