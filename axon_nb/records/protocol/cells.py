"""Cells: what is sent with one, what a rank replies at the end, and how a running one is aborted or followed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from axon_nb.records.protocol.messages import RankCall, Request
from axon_nb.records.protocol.wire import Packed

__all__ = [
    "KEY",
    "AbortLocation",
    "AbortReply",
    "AbortRequest",
    "CellEnd",
    "CellFacts",
    "CellReport",
    "CellsReply",
    "CellsRequest",
    "DebuggerCommand",
    "DebuggerStart",
    "Draws",
    "FailureReply",
    "FailureRequest",
    "Measurement",
    "Omitted",
    "Profile",
    "StopRequest",
    "execute_content",
]

KEY = "axon_nb"
"""Under this name `CellFacts` stands in the metadata of an execute request, and `CellEnd` in its reply."""


def execute_content(code: str, *, silent: bool = False) -> dict[str, Any]:
    """The content of Jupyter's request that runs `code`; a silent one is not a cell."""
    return {
        "code": code,
        "silent": silent,
        "store_history": False,
        "user_expressions": {},
        "allow_stdin": False,
        "stop_on_error": False,
    }


@dataclass(frozen=True, slots=True)
class Measurement:
    """What to measure of a cell: `--time`, `--repeat`, `--profile`."""

    is_timed: bool = False
    """Whether the cell's end waits for the device, so that its time counts."""
    repeat: int = 0
    """How often the cell runs, each time measured; 0: once."""
    profiled: tuple[int, ...] = ()
    """The ranks that take a profile."""
    folder: str = ""
    """Where traces go."""


@dataclass(frozen=True, slots=True)
class CellFacts:
    """What is sent with a cell. The defaults are those of code that another client of ipyparallel sends."""

    run: str = ""
    """Name of the cell's run, the same on all its ranks; empty for a cell of another client."""
    cell: int | None = None
    """Number that tracebacks use, the notebook's `In [n]`."""
    ranks: tuple[int, ...] = ()
    """The ranks that run it."""
    token: str | None = None
    """Under what name the rank keeps the value of the last expression; None: it does not."""
    timeout: float | None = None
    """Limit in seconds, enforced by the notebook."""
    show_value: bool = False
    quiet: bool = False
    exclusive: bool = False
    """Whether no other cell can communicate meanwhile, so that calls with ranks outside are refused at once."""
    subgroup: bool = False
    """Whether the code uses `subgroup`."""
    keep_failure: bool = False
    """Whether a failure is kept for the debugger."""
    is_debugger: bool = False
    """Whether this is a command of the debugger, which needs the failure that is kept."""
    output_limit: int | None = None
    """Bytes of text before lines are dropped and counted; None: the limit of the rank."""
    measurement: Measurement = field(default_factory=Measurement)


@dataclass(frozen=True, slots=True)
class AbortLocation:
    """Where a cell was when it was aborted or interrupted."""

    line: int | None
    call: str
    """The function of torch.distributed that it had called; empty outside one."""


@dataclass(frozen=True, slots=True)
class Draws:
    """The random numbers that a cell drew although copies of a model should not share them."""

    states: tuple[str, str]
    """Digests of the generators' states before and after."""
    dropout: str
    """Name of a model that trains with dropout; may be empty."""
    loader: str
    """Name of a DataLoader that shuffles by the shared generator; may be empty."""


@dataclass(frozen=True, slots=True)
class Profile:
    """What a profiler saw."""

    rows: tuple[Mapping[str, Any], ...]
    """The operations that took most time, a row of a table each."""
    trace: str
    """Path of the trace."""


@dataclass(frozen=True, slots=True)
class CellEnd:
    """What a rank reports at the end of a cell, besides Jupyter's own reply."""

    seconds: float = 0.0
    calls: int = 0
    """Communication calls that began."""
    aborted_at: AbortLocation | None = None
    """None if the cell was not aborted."""
    has_value: bool = False
    """Whether the last expression has a value to fetch."""
    draws: Draws | None = None
    cpu_seconds: float | None = None
    """Processor time of all threads; None if the cell failed."""
    repetitions: tuple[float, ...] | None = None
    """Seconds of each run, with `--repeat`."""
    profile: Profile | None = None


@dataclass(frozen=True, slots=True)
class AbortReply:
    """How an abort reached the main thread."""

    interrupted: bool
    """Whether a cell runs."""
    pending: int
    """Earlier interrupts that the main thread has not handled yet: it is in C code."""
    line: int | None
    """Line of the cell, if there are any."""


@dataclass(frozen=True, slots=True)
class AbortRequest(Request[AbortReply]):
    """Abort the cell, and every wait in a group, until the groups are rebuilt."""

    run: str | None = None
    """The cell's run: a rank that has not begun it refuses it. None: whatever runs."""
    again: bool = False
    """Whether the groups are poisoned already: only wake what waits."""


@dataclass(frozen=True, slots=True)
class StopRequest(Request[None]):
    """Stop before a collective, on all ranks before the same one: a consistent cut."""

    group: str
    """Name of the group; empty: count the collectives of all groups."""
    at: int
    """Number of the last collective that still begins."""


@dataclass(frozen=True, slots=True)
class Omitted:
    """Output that a rank has discarded."""

    lines: int
    size: int
    """Characters."""
    displays: int


@dataclass(frozen=True, slots=True)
class CellReport:
    """One cell as a rank kept it."""

    run: str
    facts: CellFacts | None
    """What came with it; None if the notebook has it already."""
    elapsed_ns: int
    """How long it has run, or ran."""
    messages: Packed
    """Rows of message type and content, in order."""
    last: int
    """Number of the last message; the first has 1."""
    omitted: Omitted
    """Output omitted before them."""
    outcome: Mapping[str, Any] | None
    """Jupyter's reply, with `CellEnd`; None while it runs."""


@dataclass(frozen=True, slots=True)
class CellsReply:
    """The cells that a rank keeps, and whether its groups can be used."""

    cells: tuple[CellReport, ...]
    """Oldest first."""
    running: bool
    """Whether a cell runs."""
    epoch: int
    """Number of the last rebuild of the groups."""
    aborted: bool
    """Whether an abort is in effect."""
    rebuilding: bool
    """Whether a rebuild is in progress."""


@dataclass(frozen=True, slots=True)
class CellsRequest(Request[CellsReply]):
    """Fetch what a rank keeps of its last cells: a notebook that attached asks ten times per second."""

    run: str | None = None
    """Which cell; None: all that have not ended before `after_ns`."""
    since: int = 0
    """Number of the last message that the notebook has."""
    after_ns: int = 0
    """Monotonic time of the rank's host in nanoseconds."""


@dataclass(frozen=True, slots=True)
class FailureReply:
    """The failure that a rank keeps for the debugger."""

    failure: str
    """The error in one line; empty if there is none."""


@dataclass(frozen=True, slots=True)
class FailureRequest(Request[FailureReply]):
    """Ask whether there is a failure to debug."""


@dataclass(frozen=True, slots=True)
class DebuggerStart(RankCall[str]):
    """Open the debugger on the failure that is kept; returns where that is."""

    target = "axon_nb.engine.kernel.post_mortem:start"


@dataclass(frozen=True, slots=True)
class DebuggerCommand(RankCall[tuple[str, bool]]):
    """Run one command of the debugger; returns what it shows, and whether it was the last."""

    target = "axon_nb.engine.kernel.post_mortem:command"
    line: str
