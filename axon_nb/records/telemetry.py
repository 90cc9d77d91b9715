"""Telemetry: snapshots of a rank and of a cluster, device meshes and shards, and the times at which all report."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence

from msgspec import Struct

TICK_S = 1.0
"""Seconds between two ticks."""
_source: list[Callable[[], int | None]] = []


class Activity(enum.StrEnum):
    """What a rank's main thread is doing, according to its sampler."""

    IDLE = "idle"
    """No cell is running on the rank."""
    RUNNING = "running"
    """The cell's own code is running."""
    COLLECTIVE = "collective"
    """Inside a collective or point-to-point call."""
    WAITING = "waiting"
    """In the same communication call for more than a quarter of a second."""
    PAUSED = "paused"
    """At a breakpoint: the debugger waits for the user's next command."""
    DONE = "done"
    """The rank has finished the cell; other ranks are still running it."""
    FAILED = "failed"
    """The cell raised an exception on this rank."""
    STOPPED = "stopped"
    """The cell was aborted on this rank, because it could not end or the user interrupted it."""
    DEAD = "dead"
    """The process has exited."""


class RankState(Struct, frozen=True):
    """One sample of one rank, taken on the rank and shown in the notebook."""

    rank: int
    """Rank in the default group."""
    activity: Activity
    """What the main thread is doing."""
    time_ns: int
    """Time of the sample in nanoseconds of `time.monotonic_ns`, which all processes of a host share."""
    cell: int | None = None
    """Number of the running notebook cell (its `In [n]`); None when idle."""
    line: int | None = None
    """Line of that cell; the magic's line is line 1."""
    call: str = ""
    """Name of the communication call the rank is in, such as ``all_reduce``; empty outside one."""
    since_ns: int = 0
    """Start of this activity and call, on the same clock."""
    rss_bytes: int = 0
    """Resident memory of the process, in bytes."""
    device_bytes: int = 0
    """Memory allocated on the accelerator, in bytes; 0 on CPU ranks."""
    protected: int | None = None
    """Optimizer steps in the latest state that outlives the rank; None: there is none."""


class RankInfo(Struct, frozen=True):
    """One rank of a cluster."""

    rank: int
    """Rank in the default group."""
    host: str
    """Host that it runs on."""
    pid: int
    """Process id on that host."""
    device: str
    """torch device, such as ``cpu`` or ``cuda:0``."""
    backend: str
    """Backend of the default group: ``gloo`` or ``nccl``."""
    state: str
    """What it is doing, in words."""
    rss_bytes: int
    """Resident memory of the process in bytes; 0 if unknown."""
    device_bytes: int
    """Memory allocated on the accelerator, in bytes; 0 on CPU ranks."""
    cell: int | None
    """Number of the running notebook cell (its `In [n]`); None when idle."""


class GpuUse(Struct, frozen=True, kw_only=True):
    """A GPU of the agent's host, or a MIG instance, as its driver reports it; None: it does not say."""

    index: int
    """The driver's number of the card."""
    uuid: str
    name: str
    total_bytes: int | None = None
    used_bytes: int | None = None
    busy_percent: int | None = None
    """Share of the last sample period in which a kernel ran."""
    temperature_c: int | None = None
    power_w: float | None = None


class ClusterInfo(Struct, frozen=True):
    """A cluster: its name, where it runs, and its ranks."""

    name: str
    """Name given at the start."""
    backend: str
    """Backend of the default group: ``gloo`` or ``nccl``."""
    host: str
    """Host or hosts, comma-separated."""
    num_ranks: int
    """Number of ranks, including dead ones."""
    running: bool
    """Whether it accepts cells."""
    engines: str
    """Name of the ipyparallel launcher that runs the ranks."""
    ranks: tuple[RankInfo, ...]
    """One record per rank, in rank order."""
    mesh: MeshInfo | None = None
    """The device mesh created on the ranks, if any."""
    slowed: str = ""
    """What is slowed on purpose, such as ``rank 2 × 2``; empty: nothing."""
    gpus: tuple[GpuUse, ...] = ()
    """The GPUs of the notebook's host, as the driver reports them; empty if no rank uses one."""
    protected: int | None = None
    """The optimizer step that every live rank holds in memory that outlives it; None: there is none."""


class GpuReport(Struct, frozen=True):
    """The GPUs of the agent's host."""

    gpus: tuple[GpuUse, ...]
    problem: str = ""
    """Why there are none, or fewer than the machine has; empty if nothing is wrong."""


def seconds_to_tick(every_s: float = TICK_S, *, now: float | None = None, late_s: float = 0.0) -> float:
    """Seconds until the clock next reaches a multiple of `every_s`, plus `late_s`; never zero."""
    return every_s - ((time.monotonic() if now is None else now) - late_s) % every_s


def set_cell_source(source: Callable[[], int | None]) -> None:
    """Use `source` to look up the running cell's number, its `In [n]`; it returns None when no cell runs."""
    _source[:] = [source]


def running_cell() -> int:
    """Number of the running cell; 0 if there is none, as under torchrun."""
    return (_source[0]() or 0) if _source else 0


class MeshSlice(Struct, frozen=True):
    """A 2-D slice of a mesh for drawing: its last two axes at fixed coordinates on the others."""

    place: str
    """Coordinates on the other axes, such as ``pp 0``; empty if there are none."""
    rows: tuple[tuple[int, ...], ...]
    """Ranks: the second-to-last axis from top to bottom, the last from left to right."""


class MeshInfo(Struct, frozen=True):
    """A device mesh created on the ranks."""

    name: str
    """The variable that holds it."""
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    """Size of each axis."""
    ranks: tuple[int, ...]
    """Global ranks; the last axis varies fastest."""

    def __str__(self) -> str:
        name = "mesh" if self.name == "mesh" else f"mesh {self.name}"
        return f"{name}: {' × '.join(f'{axis} {n}' for axis, n in zip(self.axes, self.shape, strict=True))}"

    def slices(self) -> list[MeshSlice]:
        """Split the mesh into 2-D slices, in order."""
        *outer, rows, columns = (1,) * (2 - len(self.shape)) + self.shape
        size = rows * columns
        slices = []
        for number, begin in enumerate(range(0, len(self.ranks), size)):
            part = self.ranks[begin : begin + size]
            lines = tuple(part[row * columns : (row + 1) * columns] for row in range(rows))
            slices.append(MeshSlice(self._place(number, outer), lines))
        return slices

    def _place(self, number: int, outer: Sequence[int]) -> str:
        places = []
        for axis, size in reversed(list(zip(self.axes, outer, strict=False))):
            number, at = divmod(number, size)
            places.append(f"{axis} {at}")
        return ", ".join(reversed(places))


class Shard(Struct, frozen=True):
    """The part of a tensor that one rank holds."""

    name: str
    """Name of the tensor, such as ``layers.0.weight``."""
    role: str
    """``parameter``, ``gradient``, ``optimizer``, ``buffer`` or ``tensor``."""
    rank: int
    """Rank in the default group."""
    global_shape: tuple[int, ...]
    """Shape of the full tensor."""
    local_shape: tuple[int, ...]
    """Shape of this part; contains a zero if the rank holds nothing."""
    offset: tuple[int, ...]
    """Index in the full tensor at which this part begins, one number per dimension."""
    placements: tuple[str, ...]
    """Placement on each mesh axis, such as ``Shard(0)`` or ``Replicate()``; empty for a plain tensor."""
    dtype: str
    """Such as ``float32``."""
    device: str
    """Such as ``cpu`` or ``cuda:0``."""
    bytes: int
    """Size of this part, padding included."""
    padding: int = 0
    """How many of these bytes are padding, added to make all parts equal in size."""
    axes: tuple[str, ...] = ()
    """Names of the mesh axes, one per placement."""
    mesh_shape: tuple[int, ...] = ()
    """Number of ranks along each axis."""
    coordinates: tuple[int, ...] = ()
    """The rank's coordinate on each axis."""
    gathered: bool = False
    """Whether the tensor is normally sharded but currently unsharded."""

    @property
    def fraction(self) -> float:
        """Fraction of the tensor's elements on this rank, 0 to 1; 1 for an empty tensor."""
        whole = part = 1
        for total, local in zip(self.global_shape, self.local_shape, strict=True):
            whole, part = whole * total, part * local
        return part / whole if whole else 1.0
