"""The result of a cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypedDict

from axon_nb.cluster.cells.record import MIME_TYPE
from axon_nb.cluster.divergence.verdict import NumbersVerdict
from axon_nb.cluster.failures.report import RankError
from axon_nb.errors import UsageError
from axon_nb.records.protocol.cells import CellEnd, Profile
from axon_nb.records.ranks import format_ranks, name_ranks


class CellViews(Protocol):
    """The views of one finished cell."""

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
    profiles: Mapping[int, Profile] = field(default_factory=dict)
    """With `--profile`: the operations that took longest, and the path of the trace, by profiled rank."""

    numbers: NumbersVerdict | None = None
    """With `config watch_numbers`: whether replicas were equal and all numbers finite; None: nothing was watched."""
    record: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """What `to_dict` returns."""
    views: CellViews | None = field(default=None, repr=False, compare=False)
    """With `--watch`: what was shown; `show` opens it again. Not pickled."""

    @property
    def ok(self) -> bool:
        """Whether the cell failed on no rank."""
        return not self.errors

    def to_dict(self) -> dict[str, Any]:
        """Return state, ranks, cause and verdict as plain JSON values, at most 4 KiB.

        `axon_nb/records/cell_result.schema.json` describes them. `CellError.to_dict` returns the same of a cell that
        failed.
        """
        return dict(self.record)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return {"text/plain": repr(self), **({MIME_TYPE: self.to_dict()} if self.record else {})}

    def __getitem__(self, rank: int) -> Any:
        """Return the value of one rank.

        Raises:
            KeyError: that rank has no value.
        """
        if rank not in self.values:
            raise KeyError(f"rank {rank} has no value; ranks with one: {format_ranks(self.values) or 'none'}")
        return self.values[rank]

    def show(self) -> None:
        """Reopen the views of a cell that ran with `--watch`: to zoom, point at and search.

        Raises:
            UsageError: it ran without.
        """
        if self.views is None:
            raise UsageError(
                "No live view was recorded: rerun the cell as `%%distributed --watch --out result`. `%timeline --cell "
                "N` shows what is still known about a finished cell."
            )
        self.views.show()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "views": None}

    def __repr__(self) -> str:
        lines = [f"rank {rank}: {value!r}" for rank, value in self.values.items()]
        lines += [f"rank {rank} failed: {error}" for rank, error in self.errors.items()]
        longest = max(self.seconds.values(), default=0.0)
        return "\n".join([f"CellResult of {name_ranks(self.seconds)}, {longest:.3g} s", *lines])


class _Measurements(TypedDict):
    cpu_seconds: Mapping[int, float]
    repetitions: Mapping[int, Sequence[float]]
    profiles: Mapping[int, Profile]


def measurements(replies: Mapping[int, CellEnd]) -> _Measurements:
    """Return the fields of `CellResult` that hold what ranks measured.

    Args:
        replies: What each rank's reply says about the cell.
    """
    return {
        "cpu_seconds": {rank: end.cpu_seconds for rank, end in replies.items() if end.cpu_seconds is not None},
        "repetitions": {rank: end.repetitions for rank, end in replies.items() if end.repetitions is not None},
        "profiles": {rank: end.profile for rank, end in replies.items() if end.profile is not None},
    }
