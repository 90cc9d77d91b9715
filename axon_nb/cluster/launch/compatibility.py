"""What the installed versions cannot do, as the self-test found: said at the start, and where it matters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from axon_nb.cluster.rpc import client
from axon_nb.cluster.settings import Settings
from axon_nb.records.compatibility import Capability, install_command
from axon_nb.records.protocol.joining import Place

__all__ = [
    "RESTART",
    "UNRELEASED_TIMEOUT_S",
    "after_failure",
    "at_start",
    "can_recover",
    "can_replace",
    "collective_timeout",
    "refusal",
]

RESTART = "`%distributed restart` starts all ranks again."
"""How to get back a dead or stuck rank that cannot be replaced."""

UNRELEASED_TIMEOUT_S = 60.0
"""Limit of a collective, in seconds, where a rank that waits in one cannot be released."""

_NEEDED = {"gloo": {"release", "rebuild"}, "nccl": {"backend_swap"}}
"""The capabilities without which groups are torch's own."""

_OF_GROUPS = {"ddp_reset", "fsdp2_reset", "pipeline_reset", "rebuild", "release", "repair", "size_check"}
"""What rests on groups that can be rebuilt: nothing more to say of these where they cannot."""

Places = Sequence[Place]
"""What each rank reported when it joined."""


def _lost(places: Iterable[Place]) -> dict[str, Capability]:
    """What does not work on some rank, by name."""
    return {capability.name: capability for place in places for capability in place.self_test.lost}


def _torch(places: Places) -> str:
    return next((place.self_test.torch for place in places if place.self_test.capabilities), "")


def can_recover(places: Iterable[Place], backend: str) -> bool:
    """Whether groups can be rebuilt after a failure.

    Args:
        places: What each rank has reported.
        backend: ``gloo`` or ``nccl``.
    """
    return not _NEEDED[backend] & set(_lost(places))


def can_replace(places: Places, backend: str) -> bool:
    """Whether a dead rank can be replaced."""
    return can_recover(places, backend) and not (backend == "gloo" and "repair" in _lost(places))


def collective_timeout(settings: Settings, *, recoverable: bool) -> float:
    """Limit of every collective, in seconds; short where nothing else ends one, unless the user has set it."""
    is_default = settings.collective_timeout == Settings().collective_timeout
    if recoverable or not is_default:
        return settings.collective_timeout
    return UNRELEASED_TIMEOUT_S


def at_start(places: Places, backend: str, *, timeout_s: float) -> list[str]:
    """What the user should know before the first cell, a paragraph each; empty when everything works.

    Args:
        places: What each rank reported.
        backend: ``gloo`` or ``nccl``.
        timeout_s: Limit of every collective, in seconds.
    """
    notes, lost = [], _lost(places)
    if not can_recover(places, backend):
        broken = [lost[name] for name in sorted(_NEEDED[backend]) if name in lost]
        notes.append(
            f"Recovery does not work with torch {_torch(places)} ({broken[0].reason}). When a rank fails, the others "
            f"wait for it for up to {timeout_s:g} s; then {RESTART}\nTo get recovery: {broken[0].fix}"
        )
        lost = {name: capability for name, capability in lost.items() if name not in _OF_GROUPS}
    notes += [
        f"{capability.lost[0].upper()}{capability.lost[1:]}: this build cannot {capability.label} "
        f"({capability.reason}).\nTo get it: {capability.fix}"
        for capability in lost.values()
        if capability.name != "backend_swap" or backend == "nccl"
    ]
    if absent := client.missing():
        notes.append(
            f"This ipyparallel lacks {', '.join(absent)}: starts and cells are slower.\n"
            f"To get it: {install_command('ipyparallel')}"
        )
    return notes


def after_failure(places: Places, backend: str, *, timeout_s: float) -> str:
    """What follows a cell that ended while ranks communicated; empty when the groups are rebuilt.

    Args:
        places: What each rank reported.
        backend: ``gloo`` or ``nccl``.
        timeout_s: Limit of every collective, in seconds.
    """
    if can_recover(places, backend):
        return ""
    return (
        f"With torch {_torch(places)} groups are not rebuilt: a rank that waits in a collective is released after "
        f"{timeout_s:g} s, and if communication fails from here on, run `%distributed restart`."
    )


def refusal(places: Places, backend: str) -> str:
    """Why no rank can be replaced; empty when one can."""
    if can_replace(places, backend):
        return ""
    return (
        f"Ranks cannot be replaced with torch {_torch(places)}. Run `%distributed restart` to start all ranks again, "
        "or use `%%distributed --ranks` to run cells on those that are left."
    )
