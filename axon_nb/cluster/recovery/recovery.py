"""Recovery after an aborted cell: rebuild the groups of all ranks, or disable them and say why.

It also reports ranks that an interrupt or a failure left one optimizer step apart.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from axon_nb.cluster.failures.health import Health
from axon_nb.cluster.failures.report import REPAIR_HINT
from axon_nb.cluster.rpc import requests
from axon_nb.cluster.rpc.answers import Answer
from axon_nb.cluster.rpc.client import RankClient
from axon_nb.errors import ClusterLostError
from axon_nb.host.client import AgentClient, outcome
from axon_nb.records.protocol.aborts import AbortReply, AbortRequest
from axon_nb.records.protocol.agent import AgentState, GetInfo
from axon_nb.records.protocol.recovery import DisableGroups, OptimizerReport, Recover, RecoveryReport
from axon_nb.records.ranks import format_ranks, name_ranks

AGENT_SILENT = "the host agent does not respond, as if it was stopped or swapped out"
_ATTEMPTS = 3
_ATTEMPT_TIMEOUT_S = 10.0
_SLOW_ATTEMPT_TIMEOUT_S = 60.0
_RESEND_INTERVAL_S = 0.25
_REPORT_EVERY = 500
"""Abandoned groups are reported each time this many more have accumulated on one rank."""

_PATIENCE_S, _PATIENCE_AFTER_INTERRUPT_S = 10.0, 1.0
"""A host agent that does not reply for this long is stopped or swapped out; ranks cannot rendezvous without it."""

_ASK_INTERVAL_S = 0.2


def describe_diverged_steps(reports: Mapping[int, Sequence[OptimizerReport]]) -> list[str]:
    """Describe, in a line per optimizer, which ranks made one step more than others in the last cell.

    Nothing is reported if ranks may differ on purpose: other optimizers, other models, other steps before the cell, no
    communication in it, or more than one step between them.

    Args:
        reports: A record per optimizer, by rank. They are numbered in the order of their first steps; an optimizer that
            has made none (-1) is matched by its variable's name.
    """
    numbers = sorted({record.number for report in reports.values() for record in report} - {-1})
    matched = [_match_optimizer(number, reports) for number in numbers]
    lines = [_describe_divergence(optimizers) for optimizers in matched if len(optimizers) == len(reports)]
    return [line for line in lines if line]


def _match_optimizer(number: int, reports: Mapping[int, Sequence[OptimizerReport]]) -> dict[int, OptimizerReport]:
    matches = {rank: record for rank, report in reports.items() for record in report if record.number == number}
    names = {record.name for record in matches.values()}
    for rank in reports.keys() - matches.keys():
        unused = (record for record in reports[rank] if record.number == -1)
        matches.update((rank, record) for record in unused if record.name in names)
    return dict(sorted(matches.items()))


def _describe_divergence(optimizers: Mapping[int, OptimizerReport]) -> str:
    first = next(iter(optimizers.values()))
    is_same = all(entry.shapes == first.shapes and entry.before == first.before for entry in optimizers.values())
    steps = {rank: record.steps for rank, record in optimizers.items()}
    most, least = max(steps.values()), min(steps.values())
    if not is_same or most - least != 1 or not all(record.communicated for record in optimizers.values()):
        return ""
    name = f"`{first.name}`" if first.name else "the optimizer"
    ahead, behind = ([rank for rank in steps if steps[rank] == count] for count in (most, least))
    verb = "is" if len(ahead) == 1 else "are"
    line = f"{name_ranks(ahead).capitalize()} {verb} at step {most} of {name}, {name_ranks(behind)} at {least}."
    reasons = {record.not_replicated for record in optimizers.values() if record.not_replicated}
    if reasons:
        return f"{line} Its model {reasons.pop()}: load a checkpoint on all ranks, or recreate model and optimizer."
    return f"{line} Run `%distributed sync` to copy models and optimizers of rank 0 to all ranks."


class AgentWatch:
    """Asks the host agent again and again whether it is there.

    Args:
        agent: The notebook's connection to it.
    """

    def __init__(self, agent: AgentClient) -> None:
        self._agent = agent
        self._asked_at = 0.0
        self._reply: Future[Any] | None = None
        self._state: AgentState | None = None

    def stopped(self, now: float) -> tuple[frozenset[int], int]:
        """Return the ranks that are stopped (SIGSTOP), and the controller's pid if it is; 0 if not."""
        self.silent_s(now)
        state = self._state
        if state is None:
            return frozenset(), 0
        return frozenset(state.stopped), (state.controller or 0) if state.controller_stopped else 0

    def silent_s(self, now: float) -> float:
        """Return for how many seconds it has owed a reply."""
        if self._reply is None or self._reply.done():
            if self._reply is not None and self._reply.exception() is None:
                self._state = outcome(GetInfo, self._reply.result())
            if now - self._asked_at > _ASK_INTERVAL_S:
                with contextlib.suppress(ClusterLostError):  # the cluster's health reports it
                    self._reply, self._asked_at = self._agent.send(GetInfo()), now
            return 0.0
        return now - self._asked_at


class Recovery:
    """One recovery, stepped by whoever steps the cell; an interrupt ends it only if the host agent does not respond.

    Args:
        client: The cluster's client.
        ranks: All ranks of the world.
        health: Updated if the groups cannot be rebuilt.
        next_epoch: Returns the epoch of an attempt, higher than any before.
        agent: Whether the host agent responds.
        interrupted: Whether the user waits for the end.
        slow_connect: Whether an attempt may take a minute rather than 10 seconds: NCCL's communicators connect slowly.
    """

    def __init__(
        self,
        client: RankClient,
        ranks: Sequence[int],
        health: Health,
        *,
        next_epoch: Callable[[], int],
        agent: AgentWatch,
        interrupted: Callable[[], bool] = lambda: False,
        slow_connect: bool = False,
    ) -> None:
        self._next_epoch = next_epoch
        self._agent = agent
        self._interrupted = interrupted
        self._attempt_timeout_s = _SLOW_ATTEMPT_TIMEOUT_S if slow_connect else _ATTEMPT_TIMEOUT_S
        self._client = client
        self._ranks = list(ranks)
        self._health = health
        self._attempt = 0
        self._futures: dict[int, Future[RecoveryReport]] = {}
        self._aborts: list[Answer[AbortReply]] = []
        self._started_at = 0.0
        self._aborted_at = 0.0

    def step(self) -> bool:
        """Do what is due; return True once the recovery is done, whether it worked or not."""
        if self._health.disconnect_reason:
            return True
        health = self._health
        missing = [rank for rank in self._ranks if rank in {*health.dead, *health.stuck, *health.lost_contexts}]
        if missing:
            remaining = [rank for rank in self._ranks if rank not in missing or rank in health.lost_contexts]
            return self._disable_groups(self._describe_missing(missing), remaining, until_back=True)
        now = time.monotonic()
        if self._agent.silent_s(now) > (_PATIENCE_AFTER_INTERRUPT_S if self._interrupted() else _PATIENCE_S):
            self._abort_attempt(now)
            print(f"The process groups were not rebuilt: {AGENT_SILENT}.", file=sys.stderr)
            reason = f"{AGENT_SILENT}; they are rebuilt with the next cell after it does"
            return self._disable_groups(reason, self._ranks, until_back=True)
        if not self._futures:
            return self._start_attempt(now)
        failed = [rank for rank, future in self._futures.items() if future.done() and future.exception() is not None]
        if all(future.done() for future in self._futures.values()):
            if not all(future.done() for future in self._aborts):
                return False  # a late one would break the rebuilt groups
            if not failed:
                reports = {rank: future.result() for rank, future in self._futures.items()}
                if lost := {rank: one.rebuilt.lost_device for rank, one in reports.items() if one.rebuilt.lost_device}:
                    print("\n".join(lost.values()), file=sys.stderr)
                    self._health.lost_contexts.update(lost)
                    return False
                self._health.groups_disabled = ""
                self._report_abandoned([report.rebuilt.abandoned for report in reports.values()])
                for line in dict.fromkeys(line for report in reports.values() for line in report.rebuilt.not_reset):
                    print(line, file=sys.stderr)
                for line in describe_diverged_steps({rank: report.steps for rank, report in reports.items()}):
                    print(line)
                return True
            self._futures = {}
            return False
        if failed or now - self._started_at > self._attempt_timeout_s:
            self._abort_attempt(now)
        return False

    def _report_abandoned(self, counts: Sequence[int]) -> None:
        # An aborted Gloo group cannot be freed: each keeps 2 threads and about 0.14 MiB until the rank exits.
        if max(counts) // _REPORT_EVERY > self._health.leaks_reported:
            self._health.leaks_reported = max(counts) // _REPORT_EVERY
            print(
                f"{max(counts)} abandoned process groups still hold threads on the ranks. Run `%distributed restart` "
                "when convenient to free them."
            )

    def _start_attempt(self, now: float) -> bool:
        if self._attempt == _ATTEMPTS:
            reason = "the process groups could not be rebuilt"
            print(f"{reason.capitalize()}. Run `%distributed repair` to try again.", file=sys.stderr)
            return self._disable_groups(f"{reason}; run `%distributed repair` to try again", self._ranks)
        self._attempt += 1
        self._started_at = now
        epoch = self._next_epoch()
        self._futures = {r: requests.call(self._client, r, Recover(epoch)) for r in self._ranks}
        return False

    def _abort_attempt(self, now: float) -> None:
        # Some ranks wait for one that failed: the next attempt starts when all are idle.
        if now - self._aborted_at > _RESEND_INTERVAL_S:
            self._aborted_at = now
            for rank, future in self._futures.items():
                if not future.done():
                    self._aborts.append(self._client.request(rank, AbortRequest(again=True)))

    def _describe_missing(self, missing: Sequence[int]) -> str:
        health, left, parts = self._health, list(missing), []
        for known, state in (
            (health.dead, "dead"),
            (health.stuck, "stuck in an earlier cell"),
            (health.lost_contexts, "without a CUDA context"),
        ):
            ranks = [rank for rank in left if rank in known]
            left = [rank for rank in left if rank not in known]
            parts += [f"{name_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} {state}"] if ranks else []
        # Without --ranks, `repair` leaves stuck ranks alone: they may come back.
        option = f" --ranks {format_ranks(missing)}" if health.stuck.intersection(missing) else ""
        pronoun = "it" if len(missing) == 1 else "them"
        repair = f"run `%distributed repair{option}` to replace {pronoun}"
        return f"{' and '.join(parts)}; {repair if health.remedy == REPAIR_HINT else 'run `%distributed restart`'}"

    def _disable_groups(self, reason: str, ranks: Sequence[int], *, until_back: bool = False) -> bool:
        self._health.groups_disabled, self._health.rebuild_when_back = reason, until_back
        for rank in ranks:
            requests.call(self._client, rank, DisableGroups(reason))
        return True
