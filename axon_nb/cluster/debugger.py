"""The notebook's side of the ranks' debuggers: at breakpoints while a cell runs, and after a rank's last failure."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from IPython.core.error import StdinNotImplementedError

from axon_nb.cluster.cells.run import CellRun
from axon_nb.cluster.rpc import request_all
from axon_nb.errors import UsageError
from axon_nb.records.protocol import inspection as protocol
from axon_nb.records.protocol.wire import RankCall, cell_source
from axon_nb.records.ranks import name_ranks, resolve_ranks

if TYPE_CHECKING:
    from axon_nb.cluster.cells.manager import CellManager

_SETTLE_S = 0.3
"""How long to wait for more ranks to pause, and for output that is on its way, before the user is asked."""
_WATCH_S = 0.1
_HELP = (
    "The commands are those of pdb; n, s, unt, r and c move all paused ranks. `rank 1` switches, `all p x` asks each, "
    "`only n` moves one; q ends the cell."
)
_MOVES = frozenset(["n", "next", "s", "step", "c", "cont", "continue", "unt", "until", "r", "return"])
"""Commands of pdb that let the cell go on."""
_HELP_WORDS = frozenset({"h", "help", "?"})
_QUIT = frozenset({"q", "quit", "exit"})
_REPLY_TIMEOUT_S = 10.0
"""Idle ranks answer in milliseconds. On a busy machine, a short timeout would wrongly report that nothing failed."""


class BreakpointPrompt:
    """Reads commands for the ranks of one cell, and sends them.

    Args:
        read: Shows a prompt and returns what the user types.
    """

    def __init__(self, read: Callable[[str], str] = input) -> None:
        self._read = read
        self._paused: dict[int, protocol.PausedEvent] = {}
        self._changed_at = 0.0
        """When a rank last paused, or a command was sent."""
        self._rank = -1
        """The rank that the user talks to."""
        self._asked: set[int] = set()
        """The ranks whose answer the user waits for, however long it takes."""
        self._last = ""
        """The last command, which an empty line repeats."""
        self._announced = ""

    def on_paused(self, rank: int, event: protocol.PausedEvent) -> None:
        """Note that a rank waits for a command; called from the IO thread."""
        self._paused[rank] = event
        self._asked.discard(rank)
        self._changed_at = time.monotonic()

    def step(self, run: CellRun) -> float:
        """Ask for a command if one is due, on the notebook's thread.

        Returns:
            How long the user took, in seconds.
        """
        began, unfinished = time.monotonic(), set(run.unfinished)
        paused = sorted(unfinished & set(self._paused))
        if not paused or _is_ending(run) or unfinished & self._asked:
            return 0.0
        is_settled = set(paused) == unfinished and run.output.drained and run.output.next_due() is None
        if not is_settled and began - self._changed_at < _SETTLE_S:
            return 0.0
        if self._rank not in paused:
            self._rank = paused[0]
        self._announce(paused)
        try:
            self._perform(run, self._ask(run).strip(), paused)
        except (EOFError, KeyboardInterrupt):
            if not _is_ending(run):
                run.interrupt()
        except StdinNotImplementedError:
            print("This front end has no input(): the paused ranks continue.")
            self._send(run, "continue", paused)
        return time.monotonic() - began

    def _announce(self, paused: list[int]) -> None:
        places = {self._paused[rank].place for rank in paused}
        text = f"{name_ranks(paused).capitalize()} paused{f' at {places.pop()}' if len(places) == 1 else ''}."
        if text != self._announced:
            print(text if self._announced else f"{text} {_HELP}")
        self._announced = text

    def _ask(self, run: CellRun) -> str:
        """Read a line; an interrupt by the user, or a cell that ends meanwhile, raises KeyboardInterrupt."""
        prompt = f"ipdb rank {self._rank}> "
        main = threading.current_thread()
        if main is not threading.main_thread():
            return self._read(prompt)
        answered = threading.Event()

        def watch() -> None:
            while not answered.wait(_WATCH_S):
                if _is_ending(run):
                    signal.pthread_kill(main.ident or 0, signal.SIGINT)
                    return

        # While a cell runs, an interrupt is only noted: here it has to end the wait.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        watcher = threading.Thread(target=watch, name="axon_nb-prompt", daemon=True)
        watcher.start()
        try:
            return self._read(prompt)
        finally:
            answered.set()
            watcher.join()
            signal.signal(signal.SIGINT, before)

    def _perform(self, run: CellRun, line: str, paused: list[int]) -> None:
        line = line or self._last
        self._last = line
        word, _, rest = line.partition(" ")
        if line in _HELP_WORDS:
            print(_HELP)
        if word in _QUIT:
            run.interrupt()
        elif word == "rank":
            self._switch(rest.strip(), paused)
        elif word == "all":
            self._send(run, rest.strip(), paused)
        elif word == "only":
            self._send(run, rest.strip(), [self._rank])
        elif line:
            self._send(run, line, paused if word in _MOVES else [self._rank])

    def _switch(self, text: str, paused: list[int]) -> None:
        if text.isdecimal() and int(text) in paused:
            self._rank = int(text)
        else:
            print(f"rank {text}: choose one of the paused ranks, {', '.join(map(str, paused))}.")

    def _send(self, run: CellRun, line: str, ranks: Iterable[int]) -> None:
        if not line:
            print("Add a command of pdb, such as `all p loss`.")
            return
        is_move = line.partition(" ")[0] in _MOVES
        self._changed_at = time.monotonic()
        for rank in ranks:
            event = self._paused.pop(rank, None)
            if event is None:
                continue
            if not is_move:
                self._asked.add(rank)
            run.request(rank, protocol.DebuggerLine(run.token, event.number, line))


def _is_ending(run: CellRun) -> bool:
    """Whether a rank has failed or died, the user has interrupted the cell, or the cluster is gone."""
    return run.cell.failed_at is not None or run.interrupted_at is not None or bool(run.cell.lost)


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
        replies = request_all(state.client, state.live_ranks, protocol.FailureRequest(), timeout_s=_REPLY_TIMEOUT_S)
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
        location, _ = self._call(protocol.DebuggerStart())
        return str(location)

    def command(self, line: str) -> tuple[str, bool]:
        """Run one command; return its output, and whether it ended the debugger."""
        value, printed = self._call(protocol.DebuggerCommand(line))
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
