"""`%%distributed --compare`: a cell on all ranks beside the same cell on one, the first difference, and its cause.

Each cause is proven by arithmetic on digests: projections are linear, so sums over ranks and ratios need no tensors.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from axon_nb.cluster.cells import source as cell_code
from axon_nb.errors import UsageError
from axon_nb.records.protocol.inspection import BeginComparison, CompareRanks, EndComparison, PrepareComparison
from axon_nb.records.protocol.wire import cell_source
from axon_nb.records.ranks import name_ranks
from axon_nb.records.training.digests import (
    Comparison,
    Digest,
    Entry,
    allowed_error,
    combined,
    distance,
    norm_of,
    ratio_of,
)

if TYPE_CHECKING:
    import pandas as pd

    from axon_nb.cluster.cells.driver import RunsCell
    from axon_nb.cluster.cluster import Cluster

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
_MISSING = "missing all-reduce"
_SCALED = "scaled by world size"
_MODE = "training mode"
_SETTINGS = "optimizer settings"
_NOT_UPDATED = "not updated"
_LOOSE = 4.0
"""How often what is allowed for one tensor is allowed for a sum of several."""
Cause = tuple[str, str]  # a name, and a sentence
_TINY = 1e-30


async def compare(cluster: Cluster, run: RunsCell, code: str, options: dict[str, Any], *, plain: str) -> Verdict:
    """Run the cell on all ranks and on one, and compare what they compute; the state from before is restored.

    Args:
        cluster: The cluster.
        run: Runs a cell on it.
        code: The cell; its first line is the comment that stands for the magic.
        options: The options of `Cluster.run`, with the ranks as a list.
        plain: Name of the plain model that stands for one that is split over ranks; empty: each rank has all of it.

    Raises:
        UsageError: the cell cannot be compared; says what to do.
    """
    state = cluster.state
    if state.world_size < 2:
        raise UsageError("--compare needs at least 2 ranks: `%distributed start -n 2`.")
    if list(options["ranks"]) != list(state.ranks):
        raise UsageError("--compare runs the cell on all ranks: leave --ranks out.")
    if plain and not plain.isidentifier():
        raise UsageError(f"--compare {plain}: must be the name of a variable.")
    cell_code.check(code, name="cell" if options.get("cell") is None else f"Cell In[{options['cell']}]")
    _, newline, body = code.partition("\n")
    options = {**options, "values": False, "show_value": False}
    inside = {**options, "quiet": True, "values": True}
    prepared = await run(cell_source(PrepareComparison(code=body, plain=plain)), **inside)
    if problem := next(filter(None, prepared.values.values()), ""):
        raise UsageError(str(problem))
    begin, end = cell_source(BeginComparison()), cell_source(EndComparison())
    await run(f"{begin}{newline}{body}\n{end}", **{**options, "restores": True})
    reference = await run(cell_source(CompareRanks()), **{**inside, "ranks": [0], "restores": True})
    result = reference.values[0]
    assert isinstance(result, Comparison)
    if result.problem:
        raise UsageError(result.problem)
    if result.random:
        raise UsageError(
            f"{result.random} draws random numbers, so no two runs are alike: draw them in an earlier cell, or switch "
            "them off (layers of the class Dropout may stay)."
        )
    return verdict(result, 1 if plain else state.world_size)


class Finding(Struct, frozen=True):
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
        if self.cause == _MODE:
            return self.explanation
        kind = f" ({self.module})" if self.module else ""
        call = f", call {self.call + 1}" if self.call else ""
        what = f"{self.what[0].upper()}{self.what[1:]} of {self.name or 'the model'}{kind}{call}"
        return (
            f"{what} is the first that differs from one rank, on {name_ranks(self.ranks)}: relative error "
            f"{self.relative:.2g}, of which rounding explains {self.allowed:.1g} at most. {self.explanation}"
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
    unlike: str = ""
    """How optimizers differ between ranks, if that is not the finding."""
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
        unlike = f"The ranks' optimizers differ: {self.unlike}." if self.unlike else ""
        return list(filter(None, [joined, skipped, unlike]))


def verdict(comparison: Comparison, replicas: int = 1) -> Verdict:
    """Judge a comparison; `replicas` is how many ranks each hold the whole model."""
    scales = scales_of(comparison.entries)
    judged = [_judge_mask(entry) if entry.kind == "mask" else judge(entry, scales) for entry in comparison.entries]
    counts: dict[str, tuple[int, int]] = {}
    rows = []
    for entry, of_entry in zip(comparison.entries, judged, strict=True):
        total, wrong = counts.get(_WHAT[entry.kind], (0, 0))
        counts[_WHAT[entry.kind]] = total + 1, wrong + bool(_wrong(of_entry))
        for rank, one in of_entry.items():
            norm = one.error / one.relative if one.relative else 0.0
            rows.append((entry.name, entry.kind, entry.call, rank, one.relative, one.allowed / norm if norm else 0.0))
    found = _other_mode(comparison) or _first(comparison, judged, scales)
    unlike = "" if found is not None and found.cause == _SETTINGS else comparison.settings
    return Verdict(found, counts, comparison.batch, comparison.unmatched, replicas, unlike, rows)


def _other_mode(comparison: Comparison) -> Finding | None:
    """What drops on some ranks only: dropout passes its input on while it is compared, so no number tells."""
    name, ranks = comparison.undropped
    dropping = name_ranks([rank for rank in comparison.places if rank not in ranks])
    text = (
        f"{name or 'The model'} drops elements on {dropping}, and none on {name_ranks(ranks)}, in evaluation mode: "
        "call `model.train()` or `model.eval()` on all ranks."
    )
    return Finding(name, "", _WHAT["mask"], "forward", 0, ranks, 0.0, 0.0, _MODE, text) if ranks else None


def _first(comparison: Comparison, judged: Sequence[Mapping[int, Judged]], scales: Scales) -> Finding | None:
    pending: int | None = None
    for at, (entry, of_entry) in enumerate(zip(comparison.entries, judged, strict=True)):
        if not _wrong(of_entry):
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


def _wrong(judged: Mapping[int, Judged]) -> list[int]:
    """Return the ranks whose error is not allowed."""
    return [rank for rank, one in judged.items() if not one.is_ok]


def _finding(entry: Entry, judged: Mapping[int, Judged], cause: Cause | None) -> Finding:
    wrong = _wrong(judged)
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


def _groups(entry: Entry) -> list[list[int]]:
    """Return the ranks that computed the same part."""
    groups = defaultdict(list)
    for rank, part in entry.parts.items():
        groups[part].append(rank)
    return list(groups.values())


def _close(one: Sequence[float], other: Sequence[float], allowed: float) -> bool:
    return distance(one, other) <= _LOOSE * allowed


def is_partial(entry: Entry, judged: Mapping[int, Judged], scales: Scales) -> bool:
    """Whether the ranks with the same part hold terms whose sum, with or without the bias, is the reference's."""
    groups = _groups(entry)
    if not all(len(group) > 1 and _differ(entry, group, judged) for group in groups):
        return False
    return all(_adds_up(entry, group, judged, scales) for group in groups)


def _differ(entry: Entry, group: Sequence[int], judged: Mapping[int, Judged]) -> bool:
    first = entry.ranks[group[0]].projections
    return any(not _close(entry.ranks[rank].projections, first, judged[rank].allowed) for rank in group)


def _adds_up(entry: Entry, group: Sequence[int], judged: Mapping[int, Judged], scales: Scales) -> bool:
    first = group[0]
    # Each term is of its rank's scale.
    terms = [[value / (scales.of(entry, rank) or 1.0) for value in entry.ranks[rank].projections] for rank in group]
    total, reference = combined(terms), entry.reference[first].projections
    allowed = max(judged[rank].allowed / (abs(scales.of(entry, rank)) or 1.0) for rank in group)
    if _close(total, reference, allowed):
        return True
    if (bias := entry.candidates.get("bias", {}).get(first)) is None:
        return False
    # The bias may be added later, or to each term.
    return any(
        _close([a + times * b for a, b in zip(total, bias.projections, strict=True)], reference, allowed)
        for times in (1, 1 - len(group))
    )


def cause_of(entry: Entry, judged: Mapping[int, Judged], comparison: Comparison, scales: Scales) -> Cause | None:
    """Return the usual cause that explains the first difference; None: none does."""
    wrong = _wrong(judged)
    if entry.kind == "start":
        return "out of sync", (
            f"{name_ranks(wrong).capitalize()} had other values than rank 0 before the cell: run `%distributed sync`, "
            "and give all ranks the same seed before they create the model."
        )
    if comparison.is_same_part:
        return "same part", (
            "All ranks give the model the same part of the batch, and one rank gives it another or all of it: cut the "
            "batch by `rank`."
        )
    if entry.kind == "mask":
        return "dropout seed", "Ranks with the same samples drop different elements: seed them alike for this layer."
    if entry.kind == "gradient":
        return _of_gradient(entry, judged, comparison, scales)
    if entry.kind == "weight":
        return _of_weight(entry, judged, comparison)
    return _of_activation(entry, judged, comparison, scales)


def _of_activation(entry: Entry, judged: Mapping[int, Judged], comparison: Comparison, scales: Scales) -> Cause | None:
    wrong = _wrong(judged)
    if entry.kind == "input" and not entry.name:
        return "other batch", (
            "The model's input is not a part of the global batch: the ranks change it as one rank does not, or "
            "--compare cannot see how the cell cuts it. Make or cut the batch in an earlier cell."
        )
    alone = entry.candidates.get("batch norm", {})
    if all(rank in alone and _close(entry.ranks[rank].projections, alone[rank].projections, judged[rank].allowed)
           for rank in wrong):  # fmt: skip
        return "batch norm", (
            "Each rank normalises its own part of the batch. Convert the model before DDP: "
            "`axon_nb.parallel.SyncBatchNorm.convert(model)`."
        )
    if (times := _added_bias(entry, judged, wrong)) is not None:
        return "bias", (
            f"The bias is added {times} times, once on every rank: add it after the sum over ranks."
            if times
            else "The bias is missing."
        )
    if is_partial(entry, judged, scales):
        where = "forward" if entry.kind in ("input", "output") else "backward"
        return _MISSING, f"Each rank holds a term, and their sum is right: the all-reduce in {where} is missing."
    if cause := _counted(entry, judged, comparison, wrong, scales):
        return cause
    # A module that sums over ranks in its backward, such as SyncBatchNorm, mixes gradients of unequal scale.
    return _mean_of_means(comparison, scales) if entry.kind.startswith("grad") else None


def _added_bias(entry: Entry, judged: Mapping[int, Judged], wrong: Sequence[int]) -> int | None:
    biases = entry.candidates.get("bias", {})
    factors = set()
    for rank in wrong:
        if rank not in biases or not biases[rank].norm:
            return None
        extra = _difference(entry.ranks[rank], entry.reference[rank])
        factor = ratio_of(extra, biases[rank].projections)
        left = distance(extra, [round(factor) * value for value in biases[rank].projections])
        if left > _LOOSE * judged[rank].allowed or round(factor) in (0, *range(-99, -1)):
            return None
        factors.add(round(factor) + 1)
    return factors.pop() if len(factors) == 1 else None


def _counted(
    entry: Entry, judged: Mapping[int, Judged], comparison: Comparison, wrong: Sequence[int], scales: Scales
) -> Cause | None:
    biases = entry.candidates.get("bias", {})
    for without in (False, True):  # the bias may be added after what is counted
        computed, meant = {}, {}
        for rank in wrong:
            bias = biases[rank].projections if without and rank in biases else (0.0,) * 16
            scale = scales.of(entry, rank)
            pairs = zip(entry.ranks[rank].projections, entry.reference[rank].projections, bias, strict=True)
            vectors = [(a - c, scale * (b - c)) for a, b, c in pairs]
            computed[rank], meant[rank] = [a for a, _ in vectors], [b for _, b in vectors]
        if (factor := _common_factor(computed, meant, judged)) is not None:
            break
    times, too_small = _multiple(factor, comparison)
    if times:
        return "doubled all-reduce", f"It is {times} times too large: it is summed over {times} ranks once too often."
    return too_small


def _multiple(factor: float | None, comparison: Comparison) -> tuple[int, Cause | None]:
    """Return the number of ranks of which something is a multiple, or 0, and the cause if it is a part instead."""
    for size in _sizes(comparison) if factor is not None else ():
        if math.isclose(factor or 0.0, size, rel_tol=0.02):
            return size, None
        if math.isclose(factor or 0.0, 1 / size, rel_tol=0.02):
            return 0, (_SCALED, f"It is {size} times too small: it is divided by {size} once too often.")
    return 0, None


def _common_factor(
    computed: Mapping[int, Sequence[float]], meant: Mapping[int, Sequence[float]], judged: Mapping[int, Judged]
) -> float | None:
    """Return the factor that all ranks' tensors have against what is meant; None: there is none."""
    factors = []
    for rank, vector in computed.items():
        factor = ratio_of(vector, meant[rank])
        left = distance(vector, [factor * value for value in meant[rank]])
        if left > _LOOSE * judged[rank].allowed * max(1.0, abs(factor)):
            return None
        factors.append(factor)
    if not factors or max(factors) - min(factors) > 0.02 * max(1e-9, *map(abs, factors)):
        return None
    return factors[0]


def _sizes(comparison: Comparison) -> list[int]:
    """Return the numbers of ranks over which something can be summed: all, those with one part, and the parts."""
    places = list(comparison.places.values())
    peers = max((place.count for place in places), default=1)
    world = len(places)
    return [size for size in dict.fromkeys((world, peers, world // peers)) if size > 1]


def _of_gradient(entry: Entry, judged: Mapping[int, Judged], comparison: Comparison, scales: Scales) -> Cause | None:
    wrong = _wrong(judged)
    if not any(entry.ranks[rank].norm for rank in wrong):
        return "no gradient", (
            f"{name_ranks(wrong).capitalize()} got no gradient: backward does not reach the parameter, or its "
            "reduction is switched off (`no_sync`, `set_requires_gradient_sync(False)`)."
        )
    for group in _groups(entry):
        if len(group) < 2 or not set(group) & set(wrong):
            continue
        vectors = [entry.ranks[rank].projections for rank in group]
        allowed = max(judged[rank].allowed for rank in group)
        if all(_close(vector, vectors[0], allowed) for vector in vectors):
            continue
        total, reference = combined(vectors), entry.reference[group[0]].projections
        if _close([value / len(group) for value in total], reference, allowed):
            return _MISSING, "Each rank has its own gradient, and their mean is right: the all-reduce is missing."
        if _close(total, reference, allowed):
            return _MISSING, "Each rank has its own gradient, and their sum is right: the all-reduce is missing."
    if cause := _clipped(entry, comparison):
        return cause
    if cause := _mean_of_means(comparison, scales):
        return cause
    factor = _common_factor(
        {rank: entry.ranks[rank].projections for rank in wrong},
        {rank: entry.reference[rank].projections for rank in wrong},
        judged,
    )
    times, too_small = _multiple(factor, comparison)
    if times:
        return _SCALED, (
            f"It is {times} times too large: it is summed over {times} ranks where the mean is meant, or the loss is "
            f"multiplied by {times}."
        )
    return too_small


def _clipped(entry: Entry, comparison: Comparison) -> Cause | None:
    """Whether each rank's gradients have the norm that all of them should have together."""
    step = [one for one in comparison.entries if one.kind == "gradient" and one.call == entry.call]
    whole = {(one.name, part): one.reference[rank] for one in step for rank, part in one.parts.items()}
    wanted = norm_of(whole.values())
    factors: dict[int, list[float]] = defaultdict(list)
    local: dict[int, list[Digest]] = defaultdict(list)
    references: dict[int, list[Digest]] = defaultdict(list)
    for one in step:
        for rank, digest in one.ranks.items():
            local[rank].append(digest)
            references[rank].append(one.reference[rank])
            if one.reference[rank].norm > 1e-3 * wanted:
                factors[rank].append(ratio_of(digest.projections, one.reference[rank].projections))
    is_constant = all(max(values) - min(values) < 0.02 * max(map(abs, values)) for values in factors.values() if values)
    alike = [rank for rank, digests in local.items() if math.isclose(norm_of(digests), wanted, rel_tol=0.01)]
    is_split = any(norm_of(digests) < 0.99 * wanted for digests in references.values())
    if is_constant and is_split and alike and any(abs(values[0] - 1) > 0.02 for values in factors.values() if values):
        return "local clipping", (
            f"{name_ranks(alike).capitalize()} clipped by the norm of their own part: take the norm over all ranks, "
            "such as with `axon_nb.parallel.clip_grad_norm`."
        )
    return None


def _mean_of_means(comparison: Comparison, scales: Scales) -> Cause | None:
    """Whether each rank's loss is the mean over its own part, and the parts are unequal."""
    parts = {place.start: rank for rank, place in comparison.places.items()}
    shares = {at: 1 / scale for at, scale in scales.by_call.items() if at[0] in parts.values() and scale}
    if len({rank for rank, _ in shares}) < len(parts) or not math.isclose(sum(shares.values()), 1.0, rel_tol=0.01):
        return None
    if max(shares.values()) - min(shares.values()) < 0.01 / len(shares):
        return None
    text = ", ".join(f"{share:.0%} on rank {rank}" for (rank, _), share in sorted(shares.items()))
    return "mean of means", (
        f"The ranks' losses are means over unequal parts of what is averaged ({text}), and all count alike: divide "
        "each rank's sum by the total over all ranks."
    )


def _of_weight(entry: Entry, judged: Mapping[int, Judged], comparison: Comparison) -> Cause | None:
    cause = _of_update(entry, judged, comparison)
    if not comparison.settings or (cause is not None and cause[0] == _NOT_UPDATED):
        return cause
    return _SETTINGS, f"The ranks' optimizers differ: {comparison.settings}. Give all ranks the same."


def _of_update(entry: Entry, judged: Mapping[int, Judged], comparison: Comparison) -> Cause | None:
    start = next((one for one in comparison.entries if one.kind == "start" and one.name == entry.name), None)
    wrong = _wrong(judged)
    if start is None or entry.call or not start.ranks.keys() >= {*wrong}:
        return None
    moved = {rank: _difference(entry.ranks[rank], start.ranks[rank]) for rank in wrong}
    meant = {rank: _difference(entry.reference[rank], start.reference[rank]) for rank in wrong}
    if (factor := _common_factor(moved, meant, judged)) is None:
        return None
    if abs(factor) < 0.01:
        return _NOT_UPDATED, f"{name_ranks(wrong).capitalize()} did not change it: their optimizer does not move it."
    times, _ = _multiple(factor, comparison)
    if times:
        return _SCALED, f"Its update is {times} times too large: the learning rate is multiplied by {times}."
    return None


def _difference(one: Digest, other: Digest) -> list[float]:
    """Return the projections of the difference of two tensors."""
    return [a - b for a, b in zip(one.projections, other.projections, strict=True)]


class Judged(Struct, frozen=True):
    """One tensor on one rank: its error, and what is allowed, in the unit of its norm."""

    error: float
    allowed: float
    relative: float
    """The error over the norm of the reference's part."""

    @property
    def is_ok(self) -> bool:
        """Whether the error is allowed."""
        return self.error <= self.allowed


class Scales:
    """By rank and call of the model, the factor between its gradients of activations and the reference's."""

    def __init__(self) -> None:
        self.by_call: dict[tuple[int, int], float] = {}

    def of(self, entry: Entry, rank: int) -> float:
        """Return the factor for a tensor of a rank; 1 for what is not the gradient of an activation."""
        return self.by_call.get((rank, entry.call), 1.0) if entry.kind in ("grad_output", "grad_input") else 1.0


def scales_of(entries: Iterable[Entry]) -> Scales:
    """Return the factors of all ranks and calls, such as one for each microbatch.

    A loss that is the mean over a part of the batch has larger gradients than one over all of it; what counts in the
    end are the gradients of parameters. The factor is that of the first gradient that a rank computes in a call.
    """
    scales = Scales()
    for entry in entries:
        if entry.kind in ("grad_output", "grad_input"):
            for rank, digest in entry.ranks.items():
                if (rank, entry.call) not in scales.by_call and entry.reference[rank].norm:
                    scales.by_call[rank, entry.call] = ratio_of(digest.projections, entry.reference[rank].projections)
    return scales


def judge(entry: Entry, scales: Scales) -> dict[int, Judged]:
    """Return by rank how far a tensor is from the reference's."""
    judged = {}
    for rank, digest in entry.ranks.items():
        reference = entry.reference[rank]
        scale = scales.of(entry, rank)
        error = distance(digest.projections, [scale * value for value in reference.projections])
        if digest.is_finite != reference.is_finite:
            error = math.inf
        allowed = abs(scale) * allowed_error(entry, rank)
        norm = abs(scale) * reference.norm
        judged[rank] = Judged(error, allowed + _TINY, error / norm if norm else (math.inf if error else 0.0))
    return judged
