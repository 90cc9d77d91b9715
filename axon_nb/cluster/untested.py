"""What users of versions that axon_nb has not been tested with are told: at the start, and where it comes to bear."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["RESTART", "after_failure", "at_start", "plain_torch", "refusal"]

RESTART = "`%distributed restart` starts all ranks afresh."
"""What gives a dead or stuck rank back where it cannot be replaced."""

Places = Sequence[Mapping[str, Any]]
"""What each rank has said of itself when it joined."""


def plain_torch(places: Places) -> str:
    """The version of a torch whose groups cannot be formed anew, since axon_nb was not tested with it; else empty."""
    return next((str(place["plain_torch"]) for place in places if place.get("plain_torch")), "")


def at_start(places: Places, *, timeout_s: float) -> list[str]:
    """A sentence for each thing that was not tested.

    Args:
        places: As said.
        timeout_s: Limit of every collective, in seconds.
    """
    notes = []
    if version := plain_torch(places):
        notes.append(
            f"axon_nb has not been tested with torch {version}: when a rank fails, the others may wait for it for "
            f"up to {timeout_s:g} s (`%distributed config collective_timeout=…`, then `%distributed restart`, changes "
            "that), and their groups may be of no use after that."
        )
    if absent := sorted({name for place in places for name in place.get("hooks_missing", ())}):
        notes.append(
            f"axon_nb has not been tested with this ipykernel or IPython, which lacks {', '.join(absent)}: cells run, "
            "without the comfort that rests on it. constraints.txt has the versions that were tested."
        )
    return notes


def after_failure(version: str) -> str:
    """What follows a cell that was ended while ranks communicated."""
    return (
        f"With torch {version}, which axon_nb has not been tested with, groups are not formed anew: "
        "if communication fails from here on, `%distributed restart`."
    )


def refusal(version: str) -> str:
    """Why a rank cannot be replaced."""
    return (
        f"Ranks cannot be replaced with torch {version}, which axon_nb has not been tested with: "
        "`%distributed restart` starts all ranks afresh, `--ranks` runs a cell on those that are left."
    )
