"""Send requests to ranks: over the control channel, which replies even if the main thread is stuck, or as calls.

A call runs a function on a rank: ipyparallel's `apply`, without importing the rank's side here.
"""

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
from axon_nb.records.ranks import name_ranks
from axon_nb.records.waits.calls import RankWaits

R = TypeVar("R")


class Replies(dict[int, R]):
    """Replies by rank, without the ranks that refused the request, failed or did not reply in time."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: dict[int, str] = {}
        """By rank that refused the request, the reason."""
        self.failed: dict[int, str] = {}
        """By rank that failed to answer the request, the error."""

    def missing(self, ranks: Iterable[int]) -> list[str]:
        """Return a sentence for each reason for which some of `ranks` neither replied nor refused."""
        ranks_by_reason: dict[str, list[int]] = {}
        for rank in ranks:
            if rank not in self and rank not in self.refused:
                ranks_by_reason.setdefault(self.failed.get(rank, ""), []).append(rank)
        return [
            f"{name_ranks(silent).capitalize()} did not reply{': ' if reason else ''}{reason.rstrip('.')}."
            for reason, silent in ranks_by_reason.items()
        ]


def request_all(client: RankClient, ranks: Iterable[int], request: Request[R], *, timeout_s: float) -> Replies[R]:
    """Send one control request to all `ranks`; return the replies of those that reply within `timeout_s` seconds."""
    return request_each(client, dict.fromkeys(ranks, request), timeout_s=timeout_s)


def request_each(client: RankClient, requests: Mapping[int, Request[R]], *, timeout_s: float) -> Replies[R]:
    """Send each rank its own control request; return the replies as `request_all` does."""
    answers: dict[int, Answer[R]] = {}
    for rank, request in requests.items():
        with contextlib.suppress(KeyError):  # unregistered meanwhile
            answers[rank] = client.request(rank, request)
    end = time.monotonic() + timeout_s
    replies: Replies[R] = Replies()
    for rank, answer in answers.items():
        if answer.wait(max(0.0, end - time.monotonic())):
            try:
                replies[rank] = answer.result()
            except RefusedError as refusal:
                replies.refused[rank] = str(refusal)
            except ProtocolError as error:
                replies.failed[rank] = str(error)
    return replies


def request_waits(client: RankClient, ranks: Iterable[int], *, timeout_s: float = 1.0) -> dict[int, RankWaits]:
    """Return what each rank waits in; ranks that do not reply within `timeout_s` seconds are left out."""
    replies = request_all(client, ranks, WaitsRequest(), timeout_s=timeout_s)
    return {rank: reply.waits for rank, reply in replies.items()}


def call(client: RankClient, rank: int, rank_call: RankCall[R]) -> Future[R]:
    """Make a call on one rank once its main thread is free; return a future of the result."""
    result: Future[Any] = client.direct_view(rank).apply_async(perform, type(rank_call), arguments_of(rank_call))
    return result
