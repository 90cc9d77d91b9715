"""After a cell was ended from outside: the groups of all ranks are formed anew, or refused with the reason."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from axon_nb.cluster import remote
from axon_nb.cluster.client import RankClient
from axon_nb.cluster.health import Health
from axon_nb.cluster.step_counts import steps_apart
from axon_nb.records.ranks import format_ranks

__all__ = ["Recovery", "next_epoch"]

_RECOVER = "axon_nb.engine.steps:recover"
_STAND_DOWN = "axon_nb.engine.groups.recovery:stand_down"
_ATTEMPTS = 3
_ATTEMPT_S = 10.0
_PATIENT_ATTEMPT_S = 60.0
_AGAIN_S = 0.25
_LEAKS_TOLD = 500
"""Told each time so many groups more have been given up on one rank."""

_last = [int(time.time())]


def next_epoch(*, above: int = 0) -> int:
    """The number of the next forming: higher than any before, and than `above`, the last that some rank has seen."""
    _last[0] = max(_last[0], above) + 1
    return _last[0]


class Recovery:
    """One recovery, stepped by whoever steps the cell; it cannot be interrupted half-way.

    Args:
        client: The cluster's client.
        ranks: All ranks of the world.
        health: Told when the groups cannot be formed.
        patient: Whether an attempt may last a minute rather than 10 seconds: NCCL's communicators connect slowly.
    """

    def __init__(self, client: RankClient, ranks: Sequence[int], health: Health, *, patient: bool = False) -> None:
        self._attempt_s = _PATIENT_ATTEMPT_S if patient else _ATTEMPT_S
        self._client = client
        self._ranks = list(ranks)
        self._health = health
        self._attempt = 0
        self._futures: dict[int, Future[Any]] = {}
        self._aborts: list[Future[Any]] = []
        self._since = 0.0
        self._aborted_at = 0.0

    def step(self) -> bool:
        """Do what is due; True when the recovery is over, one way or the other."""
        if self._health.gone:
            return True
        health = self._health
        missing = [rank for rank in self._ranks if rank in {*health.dead, *health.stuck, *health.lost}]
        if missing:
            return self._stand_down(missing)
        now = time.monotonic()
        if not self._futures:
            return self._begin(now)
        failed = [rank for rank, future in self._futures.items() if future.done() and future.exception() is not None]
        if all(future.done() for future in self._futures.values()):
            if not all(future.done() for future in self._aborts):
                return False  # a late one would break what has been formed
            if not failed:
                self._health.broken = ""
                answers = {rank: future.result() for rank, future in self._futures.items()}
                self._tell_leaks([answer["leaked"] for answer in answers.values()])
                for line in dict.fromkeys(line for answer in answers.values() for line in answer["not_reset"]):
                    print(line, file=sys.stderr)
                for line in steps_apart({rank: answer["steps"] for rank, answer in answers.items()}):
                    print(line)
                return True
            self._futures = {}
            return False
        if failed or now - self._since > self._attempt_s:
            self._wake(now)
        return False

    def _tell_leaks(self, leaked: Sequence[int]) -> None:
        # A poisoned Gloo group cannot be freed: each keeps 2 threads and some 0.14 MiB until the rank ends.
        if max(leaked) // _LEAKS_TOLD > self._health.leaks_told:
            self._health.leaks_told = max(leaked) // _LEAKS_TOLD
            print(
                f"The ranks keep the threads of {max(leaked)} process groups that were given up, which stay: "
                "`%distributed restart` gets rid of them when it suits you."
            )

    def _begin(self, now: float) -> bool:
        if self._attempt == _ATTEMPTS:
            self._health.broken = "the process groups could not be formed anew"
            return True
        self._attempt += 1
        self._since = now
        epoch = next_epoch()
        self._futures = {r: remote.call(self._client, r, _RECOVER, epoch=epoch) for r in self._ranks}
        return False

    def _wake(self, now: float) -> None:
        # Ranks that wait for one that failed: the next attempt begins when all are idle.
        if now - self._aborted_at > _AGAIN_S:
            self._aborted_at = now
            for rank, future in self._futures.items():
                if not future.done():
                    self._aborts.append(self._client.request(rank, "axon_abort", again=True))

    def _stand_down(self, missing: Sequence[int]) -> bool:
        what = "is stuck in an earlier cell" if missing[0] in self._health.stuck else "has lost its CUDA context"
        what = "is dead" if missing[0] in self._health.dead else what
        reason = f"rank {format_ranks(missing)} {what}; `%distributed repair` replaces it"
        self._health.broken = reason
        for rank in self._ranks:
            if rank not in missing or rank in self._health.lost:
                remote.call(self._client, rank, _STAND_DOWN, reason=reason)
        return True
