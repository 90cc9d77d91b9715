"""What befalls the other host and its link while a cell runs, and how the cell must end."""

from __future__ import annotations

import dataclasses
import random

from tests.cluster.launch.second_host import FAR_HOST
from tests.fuzz.fault import NAMES, STOPPED, Fault
from tests.fuzz.faults import DEATHS, KINDS, Table
from tests.fuzz.losses import endless

FAR_RANKS = (2, 3)
_LOST = rf"lost with its host '{FAR_HOST}': its agent "
_CLOSED, SILENT = rf"{_LOST}closed the connection", rf"{_LOST}has not responded for"
_SHORT_S = 2.0
_STEPS = 40


def _agent_killed(rng: random.Random, message: str) -> Fault:
    """The other host's agent is killed, and its ranks with it."""
    code, detail, names = endless(rng)
    after_s = rng.uniform(0, 0.8)
    return Fault(
        "other agent killed", detail, code, ("CellError",), _CLOSED, names=names, dies=FAR_RANKS,
        other_host="agent", loses_after_s=after_s,
    )  # fmt: skip


def _short_cut(rng: random.Random, message: str) -> Fault:
    """The link is cut for two seconds in the midst of training: nothing is lost."""
    names = tuple(rng.sample(NAMES, rng.randint(1, len(NAMES))))
    code = f"import time\nfor _ in range({_STEPS}):\n    train({list(names)!r}, 1)\n    time.sleep(0.05)"
    silently, after_s = rng.random() < 0.5, rng.uniform(0.2, 1.5)
    return Fault(
        "short cut", _cut("training", silently), code, ("",), "", names=names,
        other_host="short cut", silently=silently, loses_after_s=after_s, lasts_s=_SHORT_S,
    )  # fmt: skip


def _long_cut(rng: random.Random, message: str) -> Fault:
    """The link is cut until the cell has ended, and is back before the repair, or only after a repair without it."""
    code, detail, names = endless(rng)
    silently, after_s, what = rng.random() < 0.5, rng.uniform(0, 0.8), rng.choice(["long cut", "cut for good"])
    return Fault(
        what, _cut(detail, silently), code, ("CellError",), SILENT, names=names, dies=FAR_RANKS,
        other_host=what, silently=silently, loses_after_s=after_s,
    )  # fmt: skip


def _cut_and_interrupt(rng: random.Random, message: str) -> Fault:
    """The user presses the stop button while the link is cut; it is back soon, or late."""
    fault = _long_cut(rng, message)
    wait_s = rng.uniform(0, 3.5)
    return dataclasses.replace(
        fault, kind="cut and interrupt", detail=f"{fault.detail}, {wait_s:.1f} s before the interrupt",
        ends=("CellError", *STOPPED), says=f"{SILENT}|KeyboardInterrupt", other_host="cut and interrupt",
        lasts_s=wait_s, dies=(),
    )  # fmt: skip


def _idle_cut(rng: random.Random, message: str) -> Fault:
    """The link is cut while no cell runs; the next one says what was lost."""
    silently = rng.random() < 0.5
    return Fault(
        "cut between cells", _cut("no cell", silently), "dist.barrier()", ("CellError", "ClusterLostError"),
        SILENT, dies=FAR_RANKS, other_host="idle", silently=silently, lasts_s=rng.uniform(4.0, 6.0),
    )  # fmt: skip


def _lost_in_repair(rng: random.Random, message: str) -> Fault:
    """A rank dies, and during its repair the other host's agent, or the link for a while."""
    what = rng.choice(["agent", "short cut", "long cut"])
    rank, after_s = rng.randrange(4), rng.uniform(0, 1.0)
    action, says = rng.choice([("os.kill(os.getpid(), 9)", DEATHS["kill"]), ("os._exit(3)", DEATHS["leave"])])
    return Fault(
        "host lost in a repair", f"{what} {after_s:.2f} s into the repair of rank {rank}",
        f"import os\nif rank == {rank}: {action}\ndist.barrier()", ("CellError",), rf"rank {rank} {says}",
        dies=(rank,), other_host=f"{what} in a repair", silently=rng.random() < 0.5, loses_after_s=after_s,
        lasts_s=_SHORT_S if what == "short cut" else 5.0,
    )  # fmt: skip


def _cut(where: str, silently: bool) -> str:
    return f"{where}, {'packets lost' if silently else 'link down'}"


HOST_KINDS: Table = {
    "other agent killed": (_agent_killed, 0.25),
    "short cut": (_short_cut, 0.3),
    "long cut": (_long_cut, 0.35),
    "cut and interrupt": (_cut_and_interrupt, 0.2),
    "cut between cells": (_idle_cut, 0.1),
    "host lost in a repair": (_lost_in_repair, 0.2),
}
"""The kinds that need two hosts, and how often each is chosen, beside those of one host."""
_NOT_ACROSS_HOSTS = ("strangers", "wrong shape", "skipped call")
"""Gloo does not authenticate, and sizes, splits and reductions are compared in a file of one host (docs/faults.md)."""
KINDS_OF_TWO_HOSTS = {kind: made for kind, made in (KINDS | HOST_KINDS).items() if kind not in _NOT_ACROSS_HOSTS}
