"""What the installed versions cannot do, according to the self-test: reported at the start, and when it matters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import zmq

from axon_nb.cluster.launch.placement import Layout
from axon_nb.cluster.settings import Settings
from axon_nb.records.environment import USER_CACHE
from axon_nb.records.hooks import Capability, install_command, missing_hooks
from axon_nb.records.protocol.agent import EngineInfo

RESTART = "Run `%distributed restart` to start all ranks again."
"""How to get back a dead or stuck rank that cannot be replaced."""

UNRELEASED_TIMEOUT_S = 60.0
"""Timeout of a collective, in seconds, if a rank that waits in one cannot be released."""

_NEEDED = {"shm": {"shared_memory"}, "gloo": {"release", "rebuild"}, "nccl": {"backend_swap"}}
"""Without these capabilities, torch's own groups are used."""

_UNUSED = {"shm": {"release", "rebuild", "backend_swap"}, "gloo": {"backend_swap"}, "nccl": {"shared_memory"}}
"""Capabilities without which nothing is lost on a backend."""

_OF_GROUPS = {
    "ddp_reset",
    "fsdp2_reset",
    "pipeline_reset",
    "rebuild",
    "release",
    "repair",
    "shared_memory",
    "size_check",
}
"""What depends on groups that can be rebuilt: not reported separately if they cannot."""

AllRankInfo = Sequence[EngineInfo]
"""What each rank reported when it joined."""


def _lost(rank_info: Iterable[EngineInfo]) -> dict[str, Capability]:
    """Return what does not work on some rank, by name."""
    return {capability.name: capability for info in rank_info for capability in info.self_test.lost}


def _torch(rank_info: AllRankInfo) -> str:
    return next((info.self_test.torch for info in rank_info if info.self_test.capabilities), "")


def can_recover(rank_info: Iterable[EngineInfo], backend: str) -> bool:
    """Whether groups can be rebuilt after a failure.

    Args:
        rank_info: What each rank reported.
        backend: ``shm``, ``gloo`` or ``nccl``.
    """
    return not _NEEDED[backend] & set(_lost(rank_info))


def with_possible_backend(layout: Layout, rank_info: Iterable[EngineInfo]) -> Layout:
    """Return the layout that works with the installed versions: Gloo replaces shared memory that does not."""
    if layout.backend == "shm" and not can_recover(rank_info, "shm"):
        return msgspec.structs.replace(layout, backend="gloo")
    return layout


def can_replace(rank_info: AllRankInfo, backend: str) -> bool:
    """Whether a dead rank can be replaced."""
    return can_recover(rank_info, backend) and not (backend != "nccl" and "repair" in _lost(rank_info))


def collective_timeout(settings: Settings, *, recoverable: bool) -> float:
    """Return the timeout of every collective, in seconds: as set, or short by default if nothing else aborts one."""
    is_default = settings.collective_timeout == Settings().collective_timeout
    if recoverable or not is_default:
        return settings.collective_timeout
    return UNRELEASED_TIMEOUT_S


def at_start(rank_info: AllRankInfo, backend: str, *, timeout_s: float) -> list[str]:
    """Return what the user should know before the first cell, one paragraph each; empty if everything works.

    Args:
        rank_info: What each rank reported.
        backend: ``shm``, ``gloo`` or ``nccl``.
        timeout_s: Timeout of every collective, in seconds.
    """
    notes, lost = [], _lost(rank_info)
    if not can_recover(rank_info, backend):
        broken = [lost[name] for name in sorted(_NEEDED[backend]) if name in lost]
        notes.append(
            f"Recovery does not work with torch {_torch(rank_info)} ({broken[0].reason}). When a rank fails, the "
            f"others wait for it for up to {timeout_s:g} s. {RESTART}\nTo get recovery: {broken[0].fix}"
        )
        lost = {name: capability for name, capability in lost.items() if name not in _OF_GROUPS}
    notes += [
        f"{capability.lost[0].upper()}{capability.lost[1:]}: this build cannot {capability.label} "
        f"({capability.reason}).\nTo get it: {capability.fix}"
        for capability in lost.values()
        if capability.name not in _UNUSED[backend]
    ]
    if absent := missing_hooks("rpc.client"):
        notes.append(
            f"This ipyparallel lacks {', '.join(absent)}: starts and cells are slower.\n"
            f"To get it: {install_command('ipyparallel')}"
        )
    if wrong := _wrong_numbers(rank_info[0].self_test.torch, backend):
        notes.append(wrong)
    return notes


def wrong_numbers_mark(version: str, backend: str) -> Path:
    """The file that exists once a start has shown this user how much a torch computes wrong on a backend."""
    name = f"shown-torch-{version.partition('+')[0]}-{backend}"
    return Path(USER_CACHE.get()).expanduser() / "axon_nb" / name


def _wrong_numbers(version: str, backend: str) -> str:
    if (mark := wrong_numbers_mark(version, backend)).exists():
        return ""
    with contextlib.suppress(OSError):  # the self-test has made the folder, unless there is no place for it
        mark.touch()
    from axon_nb.wrong_numbers import note  # once per version

    return note(version, backend)


def after_failure(rank_info: AllRankInfo, backend: str, *, timeout_s: float) -> str:
    """Return what to expect after a cell was aborted while ranks communicated; empty if the groups are rebuilt.

    Args:
        rank_info: What each rank reported.
        backend: ``shm``, ``gloo`` or ``nccl``.
        timeout_s: Timeout of every collective, in seconds.
    """
    if can_recover(rank_info, backend):
        return ""
    return (
        f"With torch {_torch(rank_info)} groups are not rebuilt: a rank that waits in a collective is released after "
        f"{timeout_s:g} s, and if communication fails from here on, run `%distributed restart`."
    )


def refusal(rank_info: AllRankInfo, backend: str) -> str:
    """Return why no rank can be replaced; empty if one can."""
    if can_replace(rank_info, backend):
        return ""
    return (
        f"Ranks cannot be replaced with torch {_torch(rank_info)}. Run `%distributed restart` to start all ranks "
        "again, or use `%%distributed --ranks` to run cells on the remaining ranks."
    )


def unencrypted() -> str:
    """Why a controller that listens on TCP cannot encrypt, with the fix; empty if it does."""
    if zmq.has("curve"):
        return ""
    return (
        "This pyzmq has no CURVE: whoever reaches the controller's ports can read what cells print, and make a cell "
        "hang. Run `pip install --force-reinstall pyzmq`, whose wheel has it."
    )
