"""The debugger on a rank's last failure, as the notebook sees it: which rank, and one command after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from axon_nb.cluster.rpc.requests import ask
from axon_nb.cluster.settings import settings
from axon_nb.errors import UsageError
from axon_nb.records.protocol.cells import DebuggerCommand, DebuggerStart, FailureRequest
from axon_nb.records.protocol.messages import RankCall, cell_source
from axon_nb.records.ranks import format_ranks, resolve_ranks

if TYPE_CHECKING:
    from axon_nb.cluster.cells.manager import CellManager

__all__ = ["PostMortem"]

_LIMIT_S = 10.0
"""Idle ranks answer in milliseconds; on a busy machine it would be wrong to say that they keep nothing."""


class PostMortem:
    """A debugger on one rank; the rank is idle between two commands.

    Args:
        cells: The cells of the cluster.
        ranks: Which rank, as for a cell; None: the first that has a failure to look at.

    Raises:
        UsageError: several ranks are named, the rank runs a cell, or it keeps no failure.
    """

    def __init__(self, cells: CellManager, ranks: str | None) -> None:
        self._cells, state = cells, cells.state
        chosen = None if ranks is None else resolve_ranks(ranks, state.world_size)
        if chosen is not None and len(chosen) > 1:
            raise UsageError(f"--ranks {ranks}: the debugger opens on one rank at a time.")
        answers = ask(state.client, state.living, FailureRequest(), limit_s=_LIMIT_S)
        kept = {rank: answer.kept for rank, answer in answers.items() if answer.kept}
        self.rank = chosen[0] if chosen else min(kept, default=0)
        if self.rank in state.health.dead:
            raise UsageError(f"Rank {self.rank} is dead, and nothing is left of it to look at.")
        if self.rank not in kept:
            raise UsageError(f"{self._nothing(chosen)} {_where(kept)}")
        if self.rank in state.busy:
            raise UsageError(f"Rank {self.rank} runs a cell: wait for its end or interrupt it first.")
        self.error = kept[self.rank]
        """The failure in a line."""

    @staticmethod
    def _nothing(chosen: list[int] | None) -> str:
        who = f"Rank {chosen[0]} keeps no failure" if chosen else "No rank keeps a failure"
        if not settings.debug:
            return f"{who}, as `%distributed config debug=off` has it."
        return (
            f"{who}: it is kept until the next cell on that rank, but not when memory ran out, nor on ranks that were "
            "ended because another failed."
        )

    @property
    def alive(self) -> bool:
        """Whether the rank is there."""
        state = self._cells.state
        return state.running and self.rank not in state.health.dead

    def start(self) -> str:
        """Open it; where the failure is, as the debugger shows it."""
        found, _ = self._call(DebuggerStart())
        return str(found)

    def command(self, line: str) -> tuple[str, bool]:
        """Carry out one command; what it shows, and whether it was the last."""
        value, printed = self._call(DebuggerCommand(line))
        said, over = value if isinstance(value, tuple) else ("", True)
        return f"{printed}{said}", bool(over)

    def _call(self, call: RankCall[object]) -> tuple[object, str]:
        result = self._cells.run(cell_source(call), ranks=[self.rank], quiet=True, is_debugger=True)
        return result.values.get(self.rank), result.text.get(self.rank, "")


def _where(kept: dict[int, str]) -> str:
    return f"There is one on rank {format_ranks(kept)}." if kept else "Run the cell that fails again."
