"""What can happen to a running cell (events), and what `CellRun` does about it (effects)."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from axon_nb.cluster.failures.report import RankError
from axon_nb.records.protocol.cells import AbortLocation, CellOutcome
from axon_nb.records.telemetry import Activity


@dataclass(frozen=True, slots=True)
class Output:
    """A rank printed or displayed something."""

    rank: int
    kind: str
    content: dict[str, Any]
    metadata: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Processed:
    """The notebook has processed a rank's last `Output`: a megabyte of lines takes seconds on a busy machine."""

    at: float
    rank: int


@dataclass(frozen=True, slots=True)
class Idle:
    """A rank has sent all its output."""

    rank: int


@dataclass(frozen=True, slots=True)
class Reply:
    """A rank has finished the cell; a late one comes after the cell gave the rank up."""

    at: float
    rank: int
    outcome: CellOutcome
    aborting: bool
    """Whether ranks had been asked to stop."""
    idle: bool = False
    """Whether all its output is here."""


@dataclass(frozen=True, slots=True)
class Death:
    """A rank's process is gone; `reason` reads after its name."""

    at: float
    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class Interrupt:
    """The user interrupts the cell; a second one, a while later, also replaces ranks that are in C code."""

    at: float


@dataclass(frozen=True, slots=True)
class Timeout:
    """The cell has run for as long as it may."""


@dataclass(frozen=True, slots=True)
class Aborted:
    """Ranks were asked to stop."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The whole cluster is gone; `reason` reads after its name."""

    reason: str


@dataclass(frozen=True, slots=True)
class Recovered:
    """The groups were rebuilt, or disabled."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; what can be seen from outside the cell."""

    at: float
    drained: bool = True
    """Whether all output received so far is shown."""
    acknowledged: bool = True
    """Whether every abort was acknowledged, or will not be."""
    aborted_at: float | None = None
    """When the first abort was sent; None: none was."""
    stuck: Mapping[int, RankError] = field(default_factory=dict)
    """What each unfinished rank is stuck in, if it is, once an abort was sent."""
    unresponsive: AbstractSet[int] = frozenset()
    """Ranks in C code, which have not noticed an abort."""
    stopped: AbstractSet[int] = frozenset()
    """Ranks that nothing reaches: their process, or the controller's, is stopped."""


Event = Output | Processed | Idle | Reply | Death | Interrupt | Timeout | Aborted | Lost | Recovered | Tick


@dataclass(frozen=True, slots=True)
class Wake:
    """The next tick is due now."""


@dataclass(frozen=True, slots=True)
class ShowOutput:
    """Show output: as the cell's, or as what came after it."""

    output: Output
    is_late: bool


@dataclass(frozen=True, slots=True)
class RankDone:
    """Wait for no more output of a rank."""

    rank: int


@dataclass(frozen=True, slots=True)
class RankEnded:
    """Show in the live view how the cell ended on a rank."""

    rank: int
    activity: Activity
    at: AbortLocation | None = None
    """Where its cell was aborted; None if it was not."""


@dataclass(frozen=True, slots=True)
class LateReply:
    """A rank that was reported as stuck is back."""

    rank: int


@dataclass(frozen=True, slots=True)
class ResendAbort:
    """Send the abort again at the next tick."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Decide whether to abort the unfinished ranks, and abort them."""

    failed_at: float | None
    died: bool
    interrupted: bool
    timed_out: bool


@dataclass(frozen=True, slots=True)
class Recover:
    """Show the rest of the output, then rebuild the groups."""


Effect = Wake | ShowOutput | RankDone | RankEnded | LateReply | ResendAbort | Abort | Recover
