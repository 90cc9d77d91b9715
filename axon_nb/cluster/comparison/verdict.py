"""The verdict of a comparison: the first tensor that differs, where, by how much, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from axon_nb.cluster.comparison.arithmetic import Judged, Scales, distance, judge, scales_of
from axon_nb.cluster.comparison.causes import Cause, cause_of, is_partial
from axon_nb.records.ranks import name_ranks
from axon_nb.records.training.comparison import Comparison, Entry

if TYPE_CHECKING:
    import pandas as pd

_WHAT = {
    "start": "the weight before the cell",
    "input": "the input",
    "output": "the output",
    "mask": "the dropout mask",
    "grad_output": "the gradient of the output",
    "grad_input": "the gradient of the input",
    "gradient": "the gradient",
    "weight": "the weight after the step",
}
_FORWARD = ("input", "output", "mask")
_UNKNOWN = "No usual cause fits."


@dataclass(frozen=True, slots=True)
class Finding:
    """The first difference."""

    name: str
    """Path of the module or parameter."""
    module: str
    """Class of the module; empty for parameters."""
    what: str
    """What of it differs, such as ``the output``."""
    phase: str
    """``before``, ``forward``, ``backward`` or ``step``."""
    call: int
    ranks: tuple[int, ...]
    relative: float
    """Error over the norm of the reference's, on the worst rank."""
    allowed: float
    """What would be allowed there."""
    cause: str
    """``missing all-reduce`` and so on; empty: unknown."""
    explanation: str

    def __str__(self) -> str:
        kind = f" ({self.module})" if self.module else ""
        call = f", call {self.call + 1}" if self.call else ""
        what = f"{self.what[0].upper()}{self.what[1:]} of {self.name or 'the model'}{kind}{call}"
        return (
            f"{what} is the first that differs from one rank, on {name_ranks(self.ranks)}: relative error "
            f"{self.relative:.2g}, allowed {self.allowed:.2g}. {self.explanation}"
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a comparison found."""

    finding: Finding | None
    """None: nothing differs."""
    counts: Mapping[str, tuple[int, int]]
    """By what was compared, how many tensors, and how many of them differ."""
    batch: tuple[str, ...]
    unmatched: tuple[str, ...]
    replicas: int = 1
    """How many ranks each hold the whole model."""
    rows: Sequence[tuple[str, str, int, int, float, float]] = field(repr=False, default=())
    """Name, what, call, rank, relative error and what is allowed of each tensor on each rank."""

    def to_frame(self) -> pd.DataFrame:
        """Return one row per tensor and rank, in the order in which the reference computed them."""
        import pandas as pd

        return pd.DataFrame(self.rows, columns=["name", "what", "call", "rank", "relative_error", "allowed"])

    def __str__(self) -> str:
        return "\n".join([self.sentence, *self.notes])

    @property
    def sentence(self) -> str:
        """The verdict in one sentence."""
        if self.finding is not None:
            return str(self.finding)
        return f"All {sum(total for total, _ in self.counts.values())} tensors agree with those of one rank."

    @property
    def notes(self) -> list[str]:
        """What else a reader should know."""
        joined = f"Global batch: {', '.join(self.batch)}." if self.batch else "All ranks used the same batch."
        if not self.batch and self.replicas > 1:
            joined += f" So {self.replicas} ranks compute what one does: give each its own part, if that is not meant."
        names = ", ".join(self.unmatched[:6])
        skipped = f"Not compared, as their shapes do not fit: {names}." if names else ""
        return list(filter(None, [joined, skipped]))


def verdict(comparison: Comparison, replicas: int = 1) -> Verdict:
    """Judge a comparison; `replicas` is how many ranks each hold the whole model."""
    scales = scales_of(comparison.entries)
    judged = [_judge_mask(entry) if entry.kind == "mask" else judge(entry, scales) for entry in comparison.entries]
    counts: dict[str, tuple[int, int]] = {}
    rows = []
    for entry, of_entry in zip(comparison.entries, judged, strict=True):
        total, wrong = counts.get(_WHAT[entry.kind], (0, 0))
        counts[_WHAT[entry.kind]] = total + 1, wrong + any(not one.is_ok for one in of_entry.values())
        for rank, one in of_entry.items():
            norm = one.error / one.relative if one.relative else 0.0
            rows.append((entry.name, entry.kind, entry.call, rank, one.relative, one.allowed / norm if norm else 0.0))
    found = _first(comparison, judged, scales)
    return Verdict(found, counts, comparison.batch, comparison.unmatched, replicas, rows)


def _first(comparison: Comparison, judged: Sequence[Mapping[int, Judged]], scales: Scales) -> Finding | None:
    pending: int | None = None
    for at, (entry, of_entry) in enumerate(zip(comparison.entries, judged, strict=True)):
        if all(one.is_ok for one in of_entry.values()):
            if entry.kind not in ("start", "mask", "gradient", "weight"):
                pending = None  # what was a term is summed by now
            continue
        if entry.kind in ("input", "output", "grad_output", "grad_input") and is_partial(entry, of_entry, scales):
            pending = at if pending is None else pending
            continue
        where = at if pending is None else pending
        where = _innermost(comparison.entries, where)
        first, of_first = comparison.entries[where], judged[where]
        return _finding(first, of_first, cause_of(first, of_first, comparison, scales))
    return None


def _innermost(entries: Sequence[Entry], at: int) -> int:
    """Follow a gradient to the innermost module that produced it: the tensor is also an output, and inputs outside."""
    entry = entries[at]
    if entry.kind not in ("grad_output", "grad_input"):
        return at
    rank = next(iter(entry.ranks))
    while at + 1 < len(entries):
        following = entries[at + 1]
        same = rank in following.ranks and following.ranks[rank].projections == entry.ranks[rank].projections
        if following.kind != "grad_input" or not same:
            break
        at += 1
    return at


def _judge_mask(entry: Entry) -> dict[int, Judged]:
    first: dict[object, int] = {}
    judged = {}
    for rank, part in entry.parts.items():
        other = entry.ranks[first.setdefault(part, rank)]
        error = distance(entry.ranks[rank].projections, other.projections)
        judged[rank] = Judged(error, 1e-6, error / (other.norm or 1.0))
    return judged


def _finding(entry: Entry, judged: Mapping[int, Judged], cause: Cause | None) -> Finding:
    wrong = [rank for rank, one in judged.items() if not one.is_ok]
    worst = judged[max(wrong, key=lambda rank: judged[rank].error)]
    norm = worst.error / worst.relative if worst.relative else 1.0
    phase = (
        "forward"
        if entry.kind in _FORWARD
        else {"start": "before", "gradient": "backward", "weight": "step"}.get(entry.kind, "backward")
    )
    return Finding(
        entry.name,
        "" if entry.module == "NoneType" else entry.module,
        _WHAT[entry.kind],
        phase,
        entry.call,
        tuple(wrong),
        worst.relative,
        worst.allowed / norm if norm else 0.0,
        cause[0] if cause else "",
        cause[1] if cause else _UNKNOWN,
    )
