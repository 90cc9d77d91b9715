"""Cells: the metadata of one, the reply at its end, requests for its output and to end it, and completion of the next.

A rank refuses a request of a front end, sent while the user types, that takes too long.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field

from axon_nb.records.memory import MemoryShortage
from axon_nb.records.protocol.wire import Packed, Request, decode, encode
from axon_nb.records.slowness import Slowness

KEY = "axon_nb"
"""Key of `CellFacts` in the metadata of an execute request, of `CellEnd` in its reply, and of `Omitted` in a stream."""


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


class Measurement(Struct, frozen=True, omit_defaults=True):
    """What to measure of a cell: `--time`, `--repeat`, `--profile`."""

    is_timed: bool = False
    """Whether the end of the cell waits for the device, so that its time counts."""
    repeat: int = 0
    """How many timed runs; 0: the cell runs once."""
    profiled: tuple[int, ...] = ()
    """The ranks to profile."""
    folder: str = ""
    """The folder for traces."""


class Pauses(Struct, frozen=True, omit_defaults=True):
    """Where a cell pauses for the debugger."""

    possible: bool = False
    """Whether the notebook reads commands while the cell runs, so that `breakpoint()` pauses it."""
    at_start: bool = False
    """Before the first line."""
    before: str = ""
    """Before a call of this function, such as ``all_reduce``; empty: before none."""
    number: int = 0
    """Before which of these calls, counted from 1; 0: before each."""


class CellFacts(Struct, frozen=True, omit_defaults=True):
    """The notebook's metadata about a cell. The defaults apply to code that another client of ipyparallel sends."""

    run: str = ""
    """Id of the run, the same on all its ranks; empty for a cell of another client."""
    cell: int | None = None
    """Number that tracebacks use, the notebook's `In [n]`."""
    ranks: tuple[int, ...] = ()
    """The ranks that run it."""
    token: str | None = None
    """Key under which the rank keeps the value of the last expression; None: it does not keep it."""
    timeout: float | None = None
    """Timeout in seconds, enforced by the notebook."""
    show_value: bool = False
    quiet: bool = False
    exclusive: bool = False
    """Whether no other cell can communicate meanwhile, so that calls with ranks outside are refused at once."""
    subgroup: bool = False
    """Whether the code uses `subgroup`."""
    keep_failure: bool = False
    """Whether to keep a failure for the debugger."""
    is_debugger: bool = False
    """Whether this is a command of the debugger, which needs the saved failure."""
    pauses: Pauses = Pauses()
    output_limit: int | None = None
    """Bytes of text that the cell may print; excess lines are dropped and counted. None: the rank's own limit."""
    measurement: Measurement = Measurement()
    log_to: str | None = ""
    """Where `axon_nb.log` also writes, such as ``tensorboard:runs``; empty: nowhere; None: as before."""
    undo_memory: int | None = None
    """Bytes that a rank may keep of the states before cells; 0: none. None: the cell cannot be undone by itself."""
    protect: int | None = 0
    """A rank saves its state after every such number of optimizer steps; 0: never, and it drops what it saved. None:
    this cell is not protected."""
    slowness: Slowness = Slowness()
    """What is slowed while it runs."""
    watch_numbers: str = ""
    """``on``: a rank takes digests of each optimizer step; ``stop``: it also waits at the first number that is not
    finite; empty: neither."""
    behind: tuple[str, ...] = ()
    """Runs that had not finished when it was sent: if one of them fails on a rank, this cell does not run there."""


class AbortLocation(Struct, frozen=True):
    """Where a cell was when it was aborted or interrupted."""

    line: int | None
    call: str
    """The torch.distributed function that it had called; empty if none."""
    within: str = ""
    """The innermost function of the user there, such as `` (step, line 3)``; empty if the cell itself called it."""


class Draws(Struct, frozen=True):
    """Random numbers that a cell drew and that replicas of a model should not share."""

    states: tuple[str, str]
    """Digests of the generators' states before and after."""
    dropout: str
    """Name of a model that trains with dropout; may be empty."""
    loader: str
    """Name of a DataLoader that shuffles with the global generator; may be empty."""
    into_shards: bool = False
    """Whether they went into the shards of a tensor; `states` then stand for the last of these draws."""
    sampler: str = ""
    """What the order of a DataLoader with a DistributedSampler depends on, as a clause; empty: there is none."""


class NotedInput(Struct, frozen=True):
    """Numbers of what a module was called with, which ranks that share the model should have alike."""

    module: str
    """Empty: the model itself."""
    line: str
    """Of the cell, such as `` at line 3``."""
    call: int
    """Of the model in this cell, from 1."""
    number: float
    norm: float
    """By a fraction of which `number` may differ."""


class ModelCalls(Struct, frozen=True):
    """What a cell called a tensor-parallel model with."""

    model: str
    """Its class."""
    ranks: tuple[int, ...]
    """The ranks that share it."""
    inputs: tuple[NotedInput, ...]


class ProfiledOperation(Struct, frozen=True):
    """One operation in a profile; times are sums over its calls, in milliseconds."""

    name: str
    calls: int
    self_cpu_ms: float
    """Without the operations that it calls."""
    cpu_ms: float
    self_device_ms: float | None = None
    """None on a CPU rank."""


class Profile(Struct, frozen=True):
    """A profile of one rank."""

    operations: tuple[ProfiledOperation, ...]
    """Those that took longest, longest first."""
    trace: str
    """Path of the trace."""


class CellEnd(Struct, frozen=True, omit_defaults=True):
    """What a rank reports at the end of a cell, besides Jupyter's own reply."""

    seconds: float = 0.0
    calls: int = 0
    """Number of communication calls that it started."""
    aborted_at: AbortLocation | None = None
    """None if the cell was not aborted."""
    has_value: bool = False
    """Whether the last expression has a value to fetch."""
    draws: Draws | None = None
    model_calls: tuple[ModelCalls, ...] = ()
    cpu_seconds: float | None = None
    """CPU time of all threads; None if the cell failed."""
    repetitions: tuple[float, ...] | None = None
    """Seconds of each run, with `--repeat`."""
    profile: Profile | None = None
    threads: tuple[str, ...] = ()
    """Names of the user's threads that communicated."""
    left: tuple[str, ...] = ()
    """Calls that the rank left before they were over, such as ``all_reduce at line 3 (TimeoutError)``."""
    shortage: MemoryShortage | None = None
    """What its memory held, if the cell ran out of it."""
    outputs: int | None = None
    """How many messages it has sent on the output channel; None: not known, and an idle status follows them."""


class CellOutcome(Struct, frozen=True):
    """How a cell ended on a rank: what is used of Jupyter's reply."""

    status: str
    """``ok``, or anything else for a cell that failed."""
    ename: str = ""
    evalue: str = ""
    traceback: tuple[str, ...] = ()
    end: CellEnd = field(default_factory=CellEnd)


def read_outcome(reply: Mapping[str, Any]) -> CellOutcome:
    """Read the content of Jupyter's reply to a cell, with a `CellEnd` under `KEY`.

    Raises:
        ProtocolError: what is under `KEY` does not fit.
    """
    status = reply.get("status", "error")
    ename, evalue = reply.get("ename", ""), reply.get("evalue", "" if status == "ok" else status)
    return CellOutcome(status, ename, evalue, tuple(reply.get("traceback", ())), decode(CellEnd, reply.get(KEY, {})))


class Omitted(Struct):
    """Output that a rank has discarded."""

    lines: int = 0
    size: int = 0
    """Characters."""
    displays: int = 0


def stream_content(name: str, text: str, omitted: Omitted) -> dict[str, Any]:
    """The content of Jupyter's message with the last output of a cell, and what was omitted before it.

    Args:
        name: ``stdout`` or ``stderr``.
        text: The output.
        omitted: What the rank has not sent.
    """
    return {"name": name, "text": text, KEY: encode(omitted)}


def read_omitted(content: Mapping[str, Any]) -> Omitted | None:
    """Read from a stream's content what was omitted before its text; None: nothing, it is ordinary output.

    Raises:
        ProtocolError: what is under `KEY` does not fit.
    """
    return decode(Omitted, content[KEY]) if KEY in content else None


class CellReport(Struct, frozen=True):
    """One cell, as saved by a rank."""

    run: str
    facts: CellFacts | None
    """Its metadata; None if the notebook already has it."""
    elapsed_ns: int
    """How long it has been running, or ran."""
    messages: Packed
    """Rows of message type and content, in order."""
    last: int
    """Number of the last message; the first is 1."""
    omitted: Omitted
    """Output omitted before them."""
    outcome: CellOutcome | None
    """None while it runs."""


class CellsReply(Struct, frozen=True):
    """The cells that a rank has saved, and whether its groups are usable."""

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
    resized_from: int = 0
    """Number of ranks before a resize that is not complete; 0: there is none."""
    staged_size: int = 0
    """Number of ranks for which shards are staged; 0: none are."""


class CellsRequest(Request[CellsReply], frozen=True):
    """Fetch output and outcome of a rank's last cells; a notebook that reattached sends this ten times per second."""

    run: str | None = None
    """Which cell; None: all that had not finished before `after_ns`."""
    since: int = 0
    """Number of the last message that the notebook has."""
    after_ns: int = 0
    """Monotonic time of the rank's host in nanoseconds."""


class AbortReply(Struct, frozen=True):
    """What an abort found."""

    interrupted: bool
    """Whether a cell was interrupted."""
    pending: int
    """Earlier interrupts that the main thread has not handled yet: it is in C code."""
    line: int | None
    """Line of the cell, if there are pending interrupts."""


class AbortRequest(Request[AbortReply], frozen=True):
    """Abort the cell, and every wait in a group, until the groups are rebuilt."""

    run: str | None = None
    """The cell's run: a rank that has not started it rejects it. None: any cell."""
    again: bool = False
    """Whether the groups were closed by an earlier abort: only wake waiting threads."""
    by_user: bool = False
    """Whether the user interrupted the cell: as in a terminal, its child processes are interrupted too."""


class StopRequest(Request[None], frozen=True):
    """Stop before a certain collective, the same on all ranks: a consistent cut."""

    group: str
    """Name of the group; empty: count the collectives of all groups."""
    at: int
    """Number of the last collective that may start."""


class CompleteReply(Struct, frozen=True):
    """Completions at one place."""

    fragment: str
    """The text before the cursor to replace."""
    matches: tuple[str, ...]
    """The candidates."""


class CompleteRequest(Request[CompleteReply], frozen=True):
    """Complete a line of code."""

    line: str
    cursor: int
    """Column of the cursor."""


class InspectReply(Struct, frozen=True):
    """Help on a name."""

    found: bool
    """Whether the rank has it."""
    data: Mapping[str, str]
    """Text by mime type."""


class InspectRequest(Request[InspectReply], frozen=True):
    """Show help on a name, as `x?` and `x??` do."""

    name: str
    detail: int
    """0 or 1, as for IPython."""
    omit: tuple[str, ...] = ()
    """Sections to leave out."""


class KnownName(Struct, frozen=True):
    """What can be completed after one variable without another request."""

    type: str = ""
    """Its type, with the module; empty if there was no time for it."""
    own: tuple[str, ...] = ()
    """Attributes that its type lacks."""
    keys: tuple[str, ...] = ()
    """Keys or columns, as Python source."""


class NamesReply(Struct, frozen=True):
    """The names of a rank, small enough to be stored in the notebook."""

    names: Mapping[str, KnownName]
    """By variable."""
    types: Mapping[str, tuple[str, ...]]
    """Attributes by type, for types that the notebook does not know yet."""


class NamesRequest(Request[NamesReply], frozen=True):
    """Request the names after a cell, for completion while the rank does not reply."""

    known: tuple[str, ...] = ()
    """Types whose attributes the notebook has."""
