"""What a running cell is made of: each rank's part in it, and what goes on beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from axon_nb.cluster.result import RankError

__all__ = ["LiveView", "Part", "Stepped", "where_ended"]

_IDLE_WAIT_S = 5.0
"""After a rank's reply its last output is waited for at most this long: on a busy machine it may come far later."""


class Stepped(Protocol):
    """Something that goes on a little at each call, such as a recovery."""

    def step(self) -> bool:
        """Do what is due; True when it is over."""


class LiveView(Protocol):
    """A view that is fed while the cell runs; flushed on the notebook's thread."""

    def flush(self) -> None:
        """Show what has come since."""

    def rank_over(self, rank: int, *, failed: bool) -> None:
        """From any thread: a rank has ended the cell."""


@dataclass(slots=True)
class Part:
    """One rank's part in the cell."""

    replied_at: float = 0.0
    idle: bool = False
    error: RankError | None = None
    seconds: float = 0.0
    has_value: bool = False

    def over(self, now: float) -> bool:
        """Whether it has replied and has sent its output, or has had its time to."""
        return bool(self.replied_at) and (self.idle or now - self.replied_at > _IDLE_WAIT_S)


def where_ended(place: dict[str, Any]) -> str:
    """What a rank did when its cell was ended from outside."""
    line = f" at line {place['line']}" if place.get("line") else ""
    return f"waited in {place['call']}{line}" if place.get("call") else f"was interrupted{line}"
