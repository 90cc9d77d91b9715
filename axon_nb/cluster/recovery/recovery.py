"""After a cell was ended from outside: the groups of all ranks are formed anew, or refused with the reason.

Whether an interrupt or a failure has left ranks a step apart, and what to tell of it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from axon_nb.cluster.failures.health import Health
from axon_nb.cluster.rpc import requests
from axon_nb.cluster.rpc.answers import Answer
from axon_nb.cluster.rpc.client import RankClient
from axon_nb.records.protocol.cells import AbortReply, AbortRequest
from axon_nb.records.protocol.recovery import OptimizerReport, Recover, RecoveryReport, StandDown
from axon_nb.records.ranks import format_ranks

__all__ = ["Recovery", "next_epoch", "steps_apart"]


def steps_apart(reports: Mapping[int, Sequence[OptimizerReport]]) -> list[str]:
    """A line for each optimizer of which some ranks have made a step more than others in the last cell.

    Nothing is told where ranks may differ on purpose: other optimizers, other models, other steps before the cell, no
    communication in it, or more than one step between them.

    Args:
        reports: By rank what each says of its optimizers, which are numbered in the order of their first steps; those
            that have made none (-1) are found by their variable's name.
    """
    numbers = sorted({one.number for report in reports.values() for one in report} - {-1})
    told = [_tell(found) for number in numbers if len(found := _everywhere(number, reports)) == len(reports)]
    return [line for line in told if line]


def _everywhere(number: int, reports: Mapping[int, Sequence[OptimizerReport]]) -> dict[int, OptimizerReport]:
    found = {rank: one for rank, report in reports.items() for one in report if one.number == number}
    names = {one.name for one in found.values()}
    for rank in reports.keys() - found.keys():
        found.update((rank, one) for one in reports[rank] if one.number == -1 and one.name in names)
    return dict(sorted(found.items()))


def _tell(optimizers: Mapping[int, OptimizerReport]) -> str:
    first = next(iter(optimizers.values()))
    alike = all(one.shapes == first.shapes and one.before == first.before for one in optimizers.values())
    steps = {rank: one.steps for rank, one in optimizers.items()}
    apart = max(steps.values()) - min(steps.values())
    if not alike or apart != 1 or not all(one.communicated for one in optimizers.values()):
        return ""
    name = f"`{first.name}`" if first.name else "their optimizer"
    ahead, behind = (
        [rank for rank in steps if steps[rank] == step] for step in (max(steps.values()), min(steps.values()))
    )
    verb = "is" if len(ahead) == 1 else "are"
    where = (
        f"{_who(ahead).capitalize()} {verb} at step {steps[ahead[0]]} of {name}, {_who(behind)} at {steps[behind[0]]}"
    )
    reasons = {one.apart for one in optimizers.values() if one.apart}
    if reasons:
        return f"{where}. Its model {reasons.pop()}: load a checkpoint on all ranks, or build both anew."
    return f"{where}: `%distributed sync` copies models and optimizers of rank 0 to all."


def _who(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {format_ranks(ranks)}"


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
        self._futures: dict[int, Future[RecoveryReport]] = {}
        self._aborts: list[Answer[AbortReply]] = []
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
                self._tell_leaks([answer.rebuilt.leaked for answer in answers.values()])
                for line in dict.fromkeys(line for answer in answers.values() for line in answer.rebuilt.not_reset):
                    print(line, file=sys.stderr)
                for line in steps_apart({rank: answer.steps for rank, answer in answers.items()}):
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
        self._futures = {r: requests.call(self._client, r, Recover(epoch)) for r in self._ranks}
        return False

    def _wake(self, now: float) -> None:
        # Ranks that wait for one that failed: the next attempt begins when all are idle.
        if now - self._aborted_at > _AGAIN_S:
            self._aborted_at = now
            for rank, future in self._futures.items():
                if not future.done():
                    self._aborts.append(self._client.request(rank, AbortRequest(again=True)))

    def _stand_down(self, missing: Sequence[int]) -> bool:
        what = "is stuck in an earlier cell" if missing[0] in self._health.stuck else "has lost its CUDA context"
        what = "is dead" if missing[0] in self._health.dead else what
        reason = f"rank {format_ranks(missing)} {what}; `%distributed repair` replaces it"
        self._health.broken = reason
        for rank in self._ranks:
            if rank not in missing or rank in self._health.lost:
                requests.call(self._client, rank, StandDown(reason))
        return True
