"""The usual causes of a difference, each proven by arithmetic on what the ranks computed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from axon_nb.cluster.comparison.arithmetic import Judged, Scales, combined, distance, norm_of, ratio_of
from axon_nb.records.ranks import name_ranks
from axon_nb.records.training.comparison import Comparison, Digest, Entry

_MISSING = "missing all-reduce"
_SCALED = "scaled by world size"
_LOOSE = 4.0
"""How often what is allowed for one tensor is allowed for a sum of several."""
Cause = tuple[str, str]
"""A name, and a sentence."""


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
    """Return the usual cause that explains a difference; None: none does.

    Args:
        entry: The first tensor that differs.
        judged: What `judge` says about it.
        comparison: All that was compared.
        scales: What `scales_of` returned.
    """
    wrong = [rank for rank, one in judged.items() if not one.is_ok]
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
    wrong = [rank for rank, one in judged.items() if not one.is_ok]
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
        extra = [a - b for a, b in zip(entry.ranks[rank].projections, entry.reference[rank].projections, strict=True)]
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
    else:
        return None
    for size in _sizes(comparison):
        if math.isclose(factor, size, rel_tol=0.02):
            return "doubled all-reduce", f"It is {size} times too large: it is summed over {size} ranks once too often."
        if math.isclose(factor, 1 / size, rel_tol=0.02):
            return _SCALED, f"It is {size} times too small: it is divided by {size} once too often."
    return None


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
    if not factors or max(factors) - min(factors) > 0.02 * max(map(abs, factors)):
        return None
    return factors[0]


def _sizes(comparison: Comparison) -> list[int]:
    """Return the numbers of ranks over which something can be summed: all, those with one part, and the parts."""
    places = list(comparison.places.values())
    peers = max((place.count for place in places), default=1)
    world = len(places)
    return [size for size in dict.fromkeys((world, peers, world // peers)) if size > 1]


def _of_gradient(entry: Entry, judged: Mapping[int, Judged], comparison: Comparison, scales: Scales) -> Cause | None:
    wrong = [rank for rank, one in judged.items() if not one.is_ok]
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
    for size in _sizes(comparison) if factor is not None else ():
        if math.isclose(factor or 0.0, size, rel_tol=0.02):
            return _SCALED, (
                f"It is {size} times too large: it is summed over {size} ranks where the mean is meant, or the loss is "
                f"multiplied by {size}."
            )
        if math.isclose(factor or 0.0, 1 / size, rel_tol=0.02):
            return _SCALED, f"It is {size} times too small: it is divided by {size} once too often."
    return None


def _clipped(entry: Entry, comparison: Comparison) -> Cause | None:
    """Whether each rank's gradients have the norm that all of them should have together."""
    step = [one for one in comparison.entries if one.kind == "gradient" and one.call == entry.call]
    whole = {(one.name, part): one.reference[rank] for one in step for rank, part in one.parts.items()}
    wanted = norm_of(whole.values())
    factors: dict[int, list[float]] = defaultdict(list)
    local: dict[int, list[Digest]] = defaultdict(list)
    for one in step:
        for rank, digest in one.ranks.items():
            local[rank].append(digest)
            if one.reference[rank].norm > 1e-3 * wanted:
                factors[rank].append(ratio_of(digest.projections, one.reference[rank].projections))
    is_constant = all(max(values) - min(values) < 0.02 * max(map(abs, values)) for values in factors.values() if values)
    alike = [rank for rank, digests in local.items() if math.isclose(norm_of(digests), wanted, rel_tol=0.01)]
    is_split = any(norm_of(digests) < 0.99 * wanted for digests in _references(step).values())
    if is_constant and is_split and alike and any(abs(values[0] - 1) > 0.02 for values in factors.values() if values):
        return "local clipping", (
            f"{name_ranks(alike).capitalize()} clipped by the norm of their own part: take the norm over all ranks, "
            "such as with `axon_nb.parallel.clip_grad_norm`."
        )
    return None


def _references(step: Sequence[Entry]) -> dict[int, list[Digest]]:
    by_rank: dict[int, list[Digest]] = defaultdict(list)
    for one in step:
        for rank, digest in one.reference.items():
            by_rank[rank].append(digest)
    return by_rank


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
    start = next((one for one in comparison.entries if one.kind == "start" and one.name == entry.name), None)
    wrong = [rank for rank, one in judged.items() if not one.is_ok]
    if start is None or entry.call:
        return None
    factors = []
    for rank in wrong:
        if rank not in start.ranks:
            return None
        moved = [a - b for a, b in zip(entry.ranks[rank].projections, start.ranks[rank].projections, strict=True)]
        before = start.reference[rank].projections
        meant = [a - b for a, b in zip(entry.reference[rank].projections, before, strict=True)]
        factor = ratio_of(moved, meant)
        if distance(moved, [factor * value for value in meant]) > _LOOSE * judged[rank].allowed * max(1.0, abs(factor)):
            return None
        factors.append(factor)
    if max(factors) - min(factors) > 0.02 * max(1e-9, *map(abs, factors)):
        return None
    if abs(factors[0]) < 0.01:
        return "not updated", f"{name_ranks(wrong).capitalize()} did not change it: their optimizer does not hold it."
    for size in _sizes(comparison):
        if math.isclose(factors[0], size, rel_tol=0.02):
            return _SCALED, f"Its update is {size} times too large: the learning rate is multiplied by {size}."
    return None
