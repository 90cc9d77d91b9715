"""The ranks' variables: whether the ranks agree on each, where one differs, and which shards of tensors they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from axon_nb.cluster import rpc
from axon_nb.cluster.rpc import Replies, request_each
from axon_nb.errors import AxonError, UsageError
from axon_nb.records.protocol import inspection as protocol
from axon_nb.records.ranks import name_ranks
from axon_nb.records.telemetry import Shard
from axon_nb.records.units import count_of

if TYPE_CHECKING:
    import pandas as pd

    from axon_nb.cluster.state import ClusterState

_TIMEOUT_S = 60.0
_VARIABLE_COLUMNS = ("name", "ranks", "type", "shape", "dtype", "bytes", "device", "placements")
_MERGED_COLUMNS = {"type": "type", "shape": "shape", "dtype": "dtype", "device": "device", "placements": "where"}
"""By column, the key of the ranks' reports."""
PREDEFINED = frozenset({
    *("In", "Out", "exit", "get_ipython", "open", "quit"),
    *("device", "dist", "local_rank", "mesh", "rank", "torch", "world", "world_size"),
})  # fmt: skip
"""What every rank has without a cell."""
_NOT_COMPARED = "not compared"
_MAX_ROWS = 1000
"""Parts that are named for each rank."""
_DIFFERENCE_COLUMNS = ("part", "rank", "differing", "of", "first at", "largest difference", "values")
_LAYOUT_TIMEOUT_S = 10.0


def variables_frame(state: ClusterState) -> pd.DataFrame:
    """Return one row per variable; `bytes` is the total of all ranks.

    Raises:
        UsageError: a rank is running a cell.
    """
    import pandas as pd

    state.raise_if_busy("variables are available when it finishes (`%shards` works meanwhile)")
    living = state.live_ranks
    futures = {rank: rpc.call(state.connection.client, rank, protocol.DescribeVariables()) for rank in living}
    by_name: dict[str, dict[int, protocol.VariableFacts]] = {}
    for rank, future in futures.items():
        for fact in future.result(timeout=_TIMEOUT_S):
            by_name.setdefault(fact.name, {})[rank] = fact
    rows = [
        _variable_row(name, facts, living) for name, facts in sorted(by_name.items(), key=lambda item: item[0].lower())
    ]
    return pd.DataFrame(rows, columns=list(_VARIABLE_COLUMNS))


def _variable_row(name: str, facts: Mapping[int, protocol.VariableFacts], ranks: Sequence[int]) -> dict[str, Any]:
    merged = {
        column: _merge([getattr(fact, key) for fact in facts.values()]) for column, key in _MERGED_COLUMNS.items()
    }
    total = sum(fact.bytes for fact in facts.values())
    return {"name": name, **merged, "bytes": total, "ranks": agreement(facts, ranks)}


def _merge(values: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(values))
    return distinct[0] if len(distinct) == 1 else f"{distinct[0]}, …" if len(distinct) > 2 else " or ".join(distinct)


def agreement(facts: Mapping[int, protocol.VariableFacts], ranks: Sequence[int]) -> str:
    """Say whether ranks have the same value: ``same``, ``differs on rank 2``, ``only on ranks 0-1``.

    Args:
        facts: What each rank that has the variable reports about it.
        ranks: All ranks that reported.
    """
    missing = [rank for rank in ranks if rank not in facts]
    only = f"only on {name_ranks(facts)}" if missing else ""
    if any("Shard" in fact.where or "Partial" in fact.where for fact in facts.values()):
        return ", ".join(filter(None, ["split", only]))
    unchecked = dict.fromkeys(fact.unchecked for fact in facts.values())
    # Digests leave out what was not compared: they mean the same only where the same was left out.
    is_compared = len(unchecked) == 1 and all(fact.digest for fact in facts.values())
    kinds = {rank: (fact.type, fact.shape, fact.dtype, fact.digest * is_compared) for rank, fact in facts.items()}
    groups = Counter(kinds.values()).most_common()
    if len(groups) == 1:
        if is_compared and not any(unchecked):
            return only or ("same" if len(facts) > 1 else "")
        why = next(filter(None, unchecked), "")
        return ", ".join(filter(None, [f"{_NOT_COMPARED}: {why}" if why else _NOT_COMPARED, only]))
    if groups[0][1] == 1 or (len(groups) > 2 and groups[0][1] <= len(facts) // 2):
        return ", ".join(filter(None, ["differs", only]))
    # In a tie, the value of the lowest rank is the reference.
    most_common = [kind for kind, count in groups if count == groups[0][1]]
    reference = next(kind for kind in kinds.values() if kind in most_common)
    others = [rank for rank, kind in kinds.items() if kind != reference]
    return ", ".join(filter(None, [f"differs on {name_ranks(others)}", only]))


def difference_frame(state: ClusterState, name: str, reference: int = 0) -> pd.DataFrame:
    """Compare a variable on all ranks with that of rank `reference`; empty if all of it is the same.

    Returns:
        One row for each part and rank that differ: what leads to the part, the number of differing elements, their
        total number, the index of the first differing one, the largest absolute difference, and both values at that
        index (reference / rank). Then one row for each part that could not be compared, see `summary_of`.

    Raises:
        UsageError: a rank is running a cell, the reference rank is not available, or the variable cannot be compared.
    """
    import pandas as pd

    state.raise_if_busy("compare when it has finished")
    if reference not in state.ranks:
        raise UsageError(f"--from {reference}: ranks are 0 to {state.ranks[-1]}.")
    if reference in state.health.dead:
        raise UsageError(f"--from {reference}: rank {reference} is dead; choose another rank.")
    living = state.live_ranks
    trees = _call_all(state, dict.fromkeys(living, protocol.GetVariableTree(name)))
    if (ours := trees[reference]).refused:
        raise UsageError(f"{name!r} of rank {reference} {ours.refused}.")
    if reason := ours.skipped.get(0):
        raise UsageError(f"{name!r} of rank {reference} cannot be compared: it is {reason}.")
    found = {
        rank: _different_nodes(ours, trees[rank]) for rank in living if rank != reference and not trees[rank].refused
    }
    wanted: dict[int, tuple[int, ...]] = {
        rank: tuple(theirs for _, theirs in pairs if theirs is not None) for rank, pairs in found.items()
    }
    wanted[reference] = tuple({mine: None for pairs in found.values() for mine, _ in pairs if mine is not None})
    parts = _call_all(state, {rank: protocol.GetVariableParts(name, nodes) for rank, nodes in wanted.items() if nodes})
    rows = []
    for rank in living:
        if trees[rank].refused:
            rows.append(_difference_row(name, rank, values=trees[rank].refused))
        for mine, theirs in found.get(rank, []):
            rows.append(_difference(parts.get(reference, {}).get(mine), parts.get(rank, {}).get(theirs), rank))
    skipped = {
        (tree.paths[node], why): rank for rank, tree in reversed(trees.items()) for node, why in tree.skipped.items()
    }
    rows += [_difference_row(path, rank, values=f"{_NOT_COMPARED}: {why}") for (path, why), rank in skipped.items()]
    return pd.DataFrame(rows, columns=list(_DIFFERENCE_COLUMNS))


def summary_of(name: str, differences: pd.DataFrame) -> str:
    """Summarize what `difference_frame` has found if nothing differs; else return nothing."""
    if differences.empty:
        return f"{name!r} is the same on all ranks."
    if differences["values"].str.startswith(f"{_NOT_COMPARED}: ").all():
        parts = count_of(len(differences), "part")
        return f"{name!r} does not differ where it was compared; {parts} could not be compared:"
    return ""


def _call_all(state: ClusterState, calls: Mapping[int, Any]) -> dict[int, Any]:
    futures = {rank: rpc.call(state.connection.client, rank, call) for rank, call in calls.items()}
    return {rank: future.result(timeout=_TIMEOUT_S) for rank, future in futures.items()}


def _different_nodes(ours: protocol.VariableTree, theirs: protocol.VariableTree) -> list[tuple[int | None, int | None]]:
    """Return the parts that differ and hold none that does: their numbers in both trees; None: it has no such part."""
    pairs: list[tuple[int | None, int | None]] = []
    one, other = _Tree(ours), _Tree(theirs)

    def descend(mine: int, its: int) -> bool:
        """Add what differs; return whether that, or a part that cannot be compared, explains the digests."""
        if one.digest(mine) == other.digest(its):
            return False
        if mine in ours.skipped or its in theirs.skipped:
            return True
        left, right = one.children(mine), other.children(its)
        is_explained = False
        if one.head(mine) == other.head(its) or left.keys() & right.keys():
            for label in dict.fromkeys([*left, *right]):
                if label in left and label in right:
                    is_explained |= descend(left[label], right[label])
                else:
                    pairs.append((left.get(label), right.get(label)))
                    is_explained = True
        if not is_explained:
            pairs.append((mine, its))
        return True

    descend(0, 0)
    return pairs[:_MAX_ROWS]


class _Tree:
    """The parts of a variable by number."""

    def __init__(self, tree: protocol.VariableTree) -> None:
        self._tree = tree
        self._ends = memoryview(tree.ends).cast("q")

    def digest(self, node: int) -> bytes:
        return bytes(self._tree.digests[16 * node : 16 * node + 16])

    def head(self, node: int) -> bytes:
        return bytes(self._tree.heads[8 * node : 8 * node + 8])

    def children(self, node: int) -> dict[tuple[bytes, int], int]:
        """What a part holds, by how it is reached; the second number distinguishes parts that are reached equally."""
        found: dict[tuple[bytes, int], int] = {}
        times: Counter[bytes] = Counter()
        child = node + 1
        while child < self._ends[node]:
            label = bytes(self._tree.labels[8 * child : 8 * child + 8])
            found[label, times[label]] = child
            times[label] += 1
            child = self._ends[child]
        return found


def _difference(ours: protocol.VariablePart | None, theirs: protocol.VariablePart | None, rank: int) -> dict[str, Any]:
    if ours is None or theirs is None:
        part = ours or theirs
        where = "the reference" if theirs is None else f"rank {rank}"
        return _difference_row(part.path if part else "", rank, values=f"only on {where}: {part.text if part else '?'}")
    if ours.kind == theirs.kind and ours.array is not None and theirs.array is not None:
        return _compare(ours.path, ours.array, theirs.array, rank)
    texts = f"{ours.text} / {theirs.text}" if ours.text != theirs.text else f"{ours.text}, not equal"
    return _difference_row(ours.path, rank, values=texts)


def _compare(path: str, ours: Any, theirs: Any, rank: int) -> dict[str, Any]:
    import numpy as np

    unequal = ours != theirs
    if ours.dtype.kind in "fc":
        unequal &= ~(np.isnan(ours) & np.isnan(theirs))
    count = int(np.count_nonzero(unequal))
    if not count:
        return _difference_row(path, rank, differing=0, of=ours.size, values="equal, but of other bits: -0.0 or NaN")
    first = tuple(int(index) for index in np.argwhere(unequal)[0]) if ours.ndim else ()
    largest = None
    if ours.dtype.kind in "fciu":
        exact = np.longdouble if ours.dtype.kind in "iu" else ours.dtype  # unsigned numbers have no negative difference
        with np.errstate(all="ignore"):
            distances = np.abs(ours[unequal].astype(exact) - theirs[unequal].astype(exact))
        largest = float(distances[~np.isnan(distances)].max(initial=0.0)) if not np.isnan(distances).all() else None
    at = str(list(first)) if ours.ndim else ""
    return _difference_row(
        path, rank, differing=count, of=ours.size, at=at, largest=largest, values=f"{ours[first]} / {theirs[first]}"
    )


def _difference_row(
    part: str,
    rank: int,
    *,
    differing: int | None = None,
    of: int | None = None,
    at: str = "",
    largest: float | None = None,
    values: str,
) -> dict[str, Any]:
    return dict(zip(_DIFFERENCE_COLUMNS, (part, rank, differing, of, at, largest, values), strict=True))


def request_recording(
    state: ClusterState, name: str, known: Mapping[int, protocol.RecordingFacts]
) -> dict[int, protocol.RecordingFacts]:
    """Request what the ranks' recordings of that name hold; the known ones where they have not changed.

    Raises:
        UsageError: no rank has such a recording, or a cell is running.
    """
    state.raise_if_busy("look inside when it has finished")
    calls = {
        rank: protocol.DescribeRecording(name, known[rank].key if rank in known else 0) for rank in state.live_ranks
    }
    found = {
        rank: known[rank] if rank in known and not facts.refused and facts.key == known[rank].key else facts
        for rank, facts in _call_all(state, calls).items()
    }
    kept = {rank: facts for rank, facts in found.items() if not facts.refused}
    if not kept:
        raise UsageError(
            f"{name!r} {next(iter(found.values())).refused}: give what `inside.record(...) as seen` names."
        )
    return kept


class LayoutRequest:
    """A request that can be repeated; a rank whose shards have not changed sends only its key.

    Not thread-safe: the caller must hold a lock.

    Args:
        state: The cluster.
        names: Variables of the ranks: modules, optimizers, tensors, collections of tensors.
        gradients: Whether to include gradients.
    """

    def __init__(self, state: ClusterState, names: Sequence[str], *, gradients: bool = False) -> None:
        self._state = state
        self._request = protocol.LayoutsRequest(tuple(names), gradients)
        self._known: dict[int, tuple[str, Sequence[Shard]]] = {}
        """By rank: the key of its last reply, and the shards."""
        self._notes: list[str] = []
        self.has_changed = True
        """Whether the last reply differed from the one before."""
        self.cost_s = 0.0
        """CPU seconds that the last reply cost a rank, at most."""

    def send(self) -> tuple[list[Shard], list[str]]:
        """Request and return the shards on all live ranks, and notes on the ranks that reported none.

        Raises:
            UsageError: no rank has a variable with that name, or it holds no tensor.
            AxonError: no rank replied.
        """
        state = self._state
        living = state.live_ranks
        requests = {rank: replace(self._request, known=self._known.get(rank, ("", ()))[0]) for rank in living}
        replies = request_each(state.connection.client, requests, timeout_s=_LAYOUT_TIMEOUT_S)
        if not replies and not replies.refused:
            raise AxonError(
                " ".join(replies.missing(replies.failed))
                or f"No rank replied within {_LAYOUT_TIMEOUT_S:.0f} s. Run `%distributed status` to see what they do."
            )
        notes = _layout_notes(replies, state.ranks)
        self.cost_s = max(reply.spent_s for reply in replies.values())
        self.has_changed = notes != self._notes or replies.keys() != self._known.keys()
        self._notes = notes
        for rank, reply in replies.items():
            if reply.shards is not None:
                self.has_changed = True
                self._known[rank] = (reply.key, reply.shards)
        self._known = {rank: self._known[rank] for rank in replies}
        return [shard for _, shards in self._known.values() for shard in shards], notes


def _layout_notes(replies: Replies[protocol.LayoutsReply], ranks: Sequence[int]) -> list[str]:
    refusals = replies.refused
    if not replies:
        reason = Counter(refusals.values()).most_common(1)[0][0]
        raise UsageError(f"{name_ranks(refusals).capitalize()}: {reason}")
    notes = [
        f"{name_ranks([rank for rank in refusals if refusals[rank] == reason]).capitalize()}: {reason}"
        for reason in dict.fromkeys(refusals.values())
    ]
    return notes + replies.missing(ranks)
