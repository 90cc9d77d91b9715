"""What one cell gave back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TypedDict

from axon_nb.cluster.failures.report import RankError
from axon_nb.errors import UsageError
from axon_nb.records.protocol.cells import CellEnd
from axon_nb.records.ranks import format_ranks

__all__ = ["CellResult", "CellShown", "measured"]


class CellShown(Protocol):
    """The views of one cell that is over."""

    def show(self) -> None:
        """Open them again."""


@dataclass(frozen=True)
class CellResult:
    """Values, errors, times and text of one cell, by rank."""

    values: Mapping[int, Any] = field(default_factory=dict)
    """Value of the last expression on each rank that has one."""
    errors: Mapping[int, RankError] = field(default_factory=dict)
    """The ranks on which the cell failed."""
    seconds: Mapping[int, float] = field(default_factory=dict)
    """How long the cell ran on each rank, in seconds."""
    text: Mapping[int, str] = field(default_factory=dict)
    """What each rank printed (bounded)."""
    cpu_seconds: Mapping[int, float] = field(default_factory=dict)
    """Processor time that all threads of each rank used meanwhile, in seconds."""
    repetitions: Mapping[int, Sequence[float]] = field(default_factory=dict)
    """With `--repeat`: how long each run took on each rank, in seconds."""
    profiles: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """With `--profile`: ``rows`` of a table and the path of the ``trace``, by profiled rank."""

    views: CellShown | None = field(default=None, repr=False, compare=False)
    """With `--watch`: what was shown; `show` opens it again. It stays with this process."""

    @property
    def ok(self) -> bool:
        """Whether the cell failed on no rank."""
        return not self.errors

    def __getitem__(self, rank: int) -> Any:
        """The value of one rank.

        Raises:
            KeyError: that rank has no value.
        """
        if rank not in self.values:
            raise KeyError(f"rank {rank} has no value; ranks with one: {format_ranks(self.values) or 'none'}")
        return self.values[rank]

    def show(self) -> None:
        """Open the views of a cell that ran with `--watch` again: to zoom, to point at, to search.

        Raises:
            UsageError: it ran without.
        """
        if self.views is None:
            raise UsageError(
                "This cell ran without a view: run it as `%%distributed --watch --out result`; `%timeline --cell N` "
                "shows what is still known of one that is over."
            )
        self.views.show()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "views": None}

    def __repr__(self) -> str:
        lines = [f"rank {rank}: {value!r}" for rank, value in self.values.items()]
        lines += [f"rank {rank} failed: {error}" for rank, error in self.errors.items()]
        ranks = format_ranks(self.seconds)
        longest = max(self.seconds.values(), default=0.0)
        return "\n".join([f"CellResult of ranks {ranks}, {longest:.3g} s", *lines])


class _Measured(TypedDict):
    cpu_seconds: Mapping[int, float]
    repetitions: Mapping[int, Sequence[float]]
    profiles: Mapping[int, Mapping[str, Any]]


def measured(told: Mapping[int, CellEnd]) -> _Measured:
    """The fields of `CellResult` that hold what ranks have measured.

    Args:
        told: What each rank has told at the end of the cell.
    """
    return {
        "cpu_seconds": {rank: end.cpu_seconds for rank, end in told.items() if end.cpu_seconds is not None},
        "repetitions": {rank: end.repetitions for rank, end in told.items() if end.repetitions is not None},
        "profiles": {rank: asdict(end.profile) for rank, end in told.items() if end.profile is not None},
    }
