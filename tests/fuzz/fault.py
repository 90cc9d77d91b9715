"""A fault, and what all kinds of faults choose from."""

from __future__ import annotations

from dataclasses import dataclass, field

NAMES = ("ddp", "fsdp", "tensor", "pipeline", "interleaved")
COLLECTIVES = (
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_reduce of 16 MiB",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "functional",
    "many at once",
    "new_group",
    "reduce_scatter",
    "ring",
    "send and recv",
    "subgroups",
)
STOPPED = ("CellInterrupt", "KeyboardInterrupt")
"""How an interrupted cell ends."""


@dataclass(frozen=True)
class Fault:
    """One fault."""

    kind: str
    detail: str
    code: str
    """The cell, without its first line."""
    ends: tuple[str, ...]
    """The exceptions that may end the cell."""
    says: str
    """What the report must match."""
    interrupts: tuple[float, ...] = ()
    """When the user presses stop, in seconds after the cell has begun, each after the one before."""
    dies: tuple[int, ...] = ()
    """The ranks that die."""
    names: tuple[str, ...] = field(default=())
    """The objects that were in a step."""
    options: str = ""
    """Of the cell's first line."""
    undo: str = ""
    """A cell for all ranks that takes back what the fault changed in a rank's process."""
    stops: str = ""
    """The process that is stopped (SIGSTOP) from the interrupt to the end of the cell: agent, controller or a rank."""
    connects: bool = False
    """Whether somebody else connects to the cluster's sockets, and writes to them, while the cell runs."""
    during_repair: str = ""
    """The process that is killed while `%distributed repair` replaces the rank that died: the kernel or a rank."""
    loses: str = ""
    """The process that is killed while the cell runs: the kernel, the agent or the controller."""
    loses_after_s: float = 0.0
    """Seconds from the beginning of the cell to that, or to what befalls the other host."""
    other_host: str = ""
    """What befalls the other host: its agent is killed, or its link is cut. Needs ranks on two hosts."""
    silently: bool = False
    """Whether both ends of a cut link go on sending."""
    lasts_s: float = 0.0
    """Seconds from the moment at which a link is cut to the interrupt, or to the moment at which it is back."""
