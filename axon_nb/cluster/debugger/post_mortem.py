"""The notebook's side of the debugger on a rank's last failure: chooses the rank and sends it commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from axon_nb.cluster.rpc.requests import request_all
from axon_nb.errors import UsageError
from axon_nb.records.protocol.inspection import DebuggerCommand, DebuggerStart, FailureRequest
from axon_nb.records.protocol.messages import RankCall, cell_source
from axon_nb.records.ranks import name_ranks, resolve_ranks

if TYPE_CHECKING:
    from axon_nb.cluster.cells.manager import CellManager

_TIMEOUT_S = 10.0
"""Idle ranks answer in milliseconds. On a busy machine, a short timeout would wrongly report that nothing failed."""


class PostMortem:
    """A debugger on one rank; the rank is idle between commands.

    Args:
        cells: The cells of the cluster.
        ranks: The rank, as for a cell; None: the first one with a failure to debug.

    Raises:
        UsageError: several ranks are given, or the rank is running a cell, is dead or has no failure to debug.
    """

    def __init__(self, cells: CellManager, ranks: str | None) -> None:
        self._cells, state = cells, cells.state
        selection = None if ranks is None else resolve_ranks(ranks, state.world_size)
        if selection is not None and len(selection) > 1:
            raise UsageError(f"--ranks {ranks}: the debugger opens on one rank at a time.")
        replies = request_all(state.client, state.live_ranks, FailureRequest(), timeout_s=_TIMEOUT_S)
        failures = {rank: reply.failure for rank, reply in replies.items() if reply.failure}
        self.rank = selection[0] if selection else min(failures, default=0)
        if self.rank in state.health.dead:
            raise UsageError(f"Rank {self.rank} is dead: there is nothing to debug.")
        if self.rank not in failures:
            raise UsageError(_no_failure(selection, failures, kept=cells.settings.debug))
        if self.rank in state.busy:
            raise UsageError(f"Rank {self.rank} is running a cell: wait until it finishes, or interrupt it.")
        self.error = failures[self.rank]
        """The failure in one line."""

    @property
    def alive(self) -> bool:
        """Whether the rank is alive."""
        state = self._cells.state
        return state.running and self.rank not in state.health.dead

    def start(self) -> str:
        """Open the debugger; return the location of the failure, as the debugger shows it."""
        location, _ = self._call(DebuggerStart())
        return str(location)

    def command(self, line: str) -> tuple[str, bool]:
        """Run one command; return its output, and whether it ended the debugger."""
        value, printed = self._call(DebuggerCommand(line))
        shown, ended = value if isinstance(value, tuple) else ("", True)
        return f"{printed}{shown}", bool(ended)

    def _call(self, call: RankCall[object]) -> tuple[object, str]:
        result = self._cells.run(cell_source(call), ranks=[self.rank], quiet=True, is_debugger=True)
        return result.values.get(self.rank), result.text.get(self.rank, "")


def _no_failure(selection: list[int] | None, failures: dict[int, str], *, kept: bool) -> str:
    if not kept:
        return (
            "Nothing to debug: failures are not kept (`%distributed config debug=off`). "
            "Run `%distributed config debug=on`, then rerun the failing cell."
        )
    who = f"Rank {selection[0]} has no failure" if selection else "No rank has a failure"
    fix = f"There is one on {name_ranks(failures)}." if failures else "Rerun the failing cell."
    return (
        f"{who} to debug: a failure is kept until the rank's next cell, unless memory ran out or the rank was aborted "
        f"because another one failed. {fix}"
    )
