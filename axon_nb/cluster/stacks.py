"""Where every rank is: its Python stack and its communication call, asked over the control channel."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from axon_nb.cluster.client import RankClient
from axon_nb.cluster.status import describe_state
from axon_nb.cluster.waits import ask, ask_waits
from axon_nb.records.stacks import RankStack, StackFrame, Stacks
from axon_nb.records.state import Activity, RankState
from axon_nb.records.waits import missing_ranks

__all__ = ["rank_stacks"]

_STACKS_LIMIT_S = 2.0
_SILENT = "does not answer: it is in C code that keeps Python's lock, or the machine is overloaded"


def rank_stacks(client: RankClient, ranks: Sequence[int], world: Sequence[int], dead: Mapping[int, str]) -> Stacks:
    """The stacks of some ranks; those that do not answer within 2 seconds, or are dead, say so instead.

    Args:
        client: The cluster's client.
        ranks: Whose stacks.
        world: All ranks; asked whom the others wait for.
        dead: Why each dead rank died; reads after its name.
    """
    answers = ask(client, [rank for rank in ranks if rank not in dead], "axon_stacks", limit_s=_STACKS_LIMIT_S)
    states = {rank: RankState(**{**a["state"], "activity": Activity(a["state"]["activity"])})
              for rank, a in answers.items()}  # fmt: skip
    late: dict[int, tuple[int, ...]] = {}
    if any(state.activity is Activity.WAITING for state in states.values()):
        late = missing_ranks(ask_waits(client, [rank for rank in world if rank not in dead]), 0.0)
    stacks = {}
    for rank in ranks:
        if rank in dead:
            stacks[rank] = RankStack(dead[rank])
        elif rank not in answers:
            stacks[rank] = RankStack(_SILENT)
        else:
            state = states[rank]
            # Without the time, which is another for each rank: those that do the same are told once.
            words = describe_state(dataclasses.replace(state, since_ns=state.time_ns), late.get(rank, ()))
            seconds = (state.time_ns - state.since_ns) / 1e9 if state.activity is Activity.WAITING else 0.0
            frames = tuple(StackFrame(**frame) for frame in answers[rank]["frames"])
            stacks[rank] = RankStack(words.rstrip(","), frames, state.cell, seconds)
    return Stacks(stacks)
