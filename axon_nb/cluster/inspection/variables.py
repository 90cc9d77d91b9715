"""Tables of the ranks' variables: whether the ranks agree on each one, and where one differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from axon_nb.cluster.rpc import requests
from axon_nb.errors import UsageError
from axon_nb.records.protocol.inspection import DescribeVariables, GetVariableParts, VariableFacts, VariableParts
from axon_nb.records.ranks import name_ranks

if TYPE_CHECKING:
    import pandas as pd

    from axon_nb.cluster.state import ClusterState

__all__ = ["PREDEFINED", "agreement", "difference_frame", "variables_frame"]

_TIMEOUT_S = 60.0
_VARIABLE_COLUMNS = ("name", "type", "shape", "dtype", "device", "placements", "bytes", "ranks")
_MERGED_COLUMNS = {"type": "type", "shape": "shape", "dtype": "dtype", "device": "device", "placements": "where"}
"""By column, the key of the ranks' reports."""
PREDEFINED = frozenset({
    *("In", "Out", "exit", "get_ipython", "open", "quit"),
    *("device", "dist", "local_rank", "mesh", "rank", "torch", "world", "world_size"),
})  # fmt: skip
"""What every rank has without a cell."""
_DIFFERENCE_COLUMNS = ("part", "rank", "differing", "of", "first at", "largest difference", "values")


def variables_frame(state: ClusterState) -> pd.DataFrame:
    """Return one row per variable; `bytes` is the total of all ranks.

    Raises:
        UsageError: a rank is running a cell.
    """
    import pandas as pd

    if state.busy:
        raise UsageError(
            f"A cell is running on {name_ranks(state.busy)}: variables are available when it finishes (`%shards` works "
            "meanwhile)."
        )
    living = state.live_ranks
    futures = {rank: requests.call(state.connection.client, rank, DescribeVariables()) for rank in living}
    by_name: dict[str, dict[int, VariableFacts]] = {}
    for rank, future in futures.items():
        for fact in future.result(timeout=_TIMEOUT_S):
            by_name.setdefault(fact.name, {})[rank] = fact
    rows = [
        _variable_row(name, facts, living) for name, facts in sorted(by_name.items(), key=lambda item: item[0].lower())
    ]
    return pd.DataFrame(rows, columns=list(_VARIABLE_COLUMNS))


def _variable_row(name: str, facts: Mapping[int, VariableFacts], ranks: Sequence[int]) -> dict[str, Any]:
    merged = {
        column: _merge([getattr(fact, key) for fact in facts.values()]) for column, key in _MERGED_COLUMNS.items()
    }
    total = sum(fact.bytes for fact in facts.values())
    return {"name": name, **merged, "bytes": total, "ranks": agreement(facts, ranks)}


def _merge(values: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(values))
    return distinct[0] if len(distinct) == 1 else f"{distinct[0]}, …" if len(distinct) > 2 else " or ".join(distinct)


def agreement(facts: Mapping[int, VariableFacts], ranks: Sequence[int]) -> str:
    """Say whether ranks have the same value: ``same``, ``differs on rank 2``, ``only on ranks 0-1``.

    Args:
        facts: What each rank that has the variable reports about it.
        ranks: All ranks that reported.
    """
    missing = [rank for rank in ranks if rank not in facts]
    only = f"only on {name_ranks(facts)}" if missing else ""
    if any("Shard" in fact.where or "Partial" in fact.where for fact in facts.values()):
        return ", ".join(filter(None, ["split", only]))
    kinds = {rank: (fact.type, fact.shape, fact.dtype, fact.digest) for rank, fact in facts.items()}
    groups = Counter(kinds.values()).most_common()
    if len(groups) == 1:
        has_digest = bool(groups[0][0][3])
        return only or ("same" if has_digest and len(facts) > 1 else "" if has_digest else "not compared")
    if groups[0][1] == 1 or (len(groups) > 2 and groups[0][1] <= len(facts) // 2):
        return ", ".join(filter(None, ["differs", only]))
    # In a tie, the value of the lowest rank is the reference.
    most_common = [kind for kind, count in groups if count == groups[0][1]]
    reference = next(kind for kind in kinds.values() if kind in most_common)
    others = [rank for rank, kind in kinds.items() if kind != reference]
    return ", ".join(filter(None, [f"differs on {name_ranks(others)}", only]))


def difference_frame(state: ClusterState, name: str, reference: int = 0) -> pd.DataFrame:
    """Compare a variable on all ranks with that of rank `reference`; empty if it does not differ.

    Args:
        state: The cluster.
        name: The name of a tensor, a module, an array, a table, or anything else with a text form.
        reference: The rank to compare with.

    Returns:
        One row for each part and rank that differ: the number of differing elements, their total number, the index of
        the first differing one, the largest absolute difference, and both values at that index (reference / rank).

    Raises:
        UsageError: a rank is running a cell, the reference rank is not available, or the variable cannot be compared.
    """
    import pandas as pd

    if state.busy:
        raise UsageError(f"A cell is running on {name_ranks(state.busy)}: compare when it has finished.")
    if reference not in state.ranks:
        raise UsageError(f"--from {reference}: ranks are 0 to {state.ranks[-1]}.")
    if reference in state.health.dead:
        raise UsageError(f"--from {reference}: rank {reference} is dead; choose another rank.")
    living = state.live_ranks
    futures = {rank: requests.call(state.connection.client, rank, GetVariableParts(name)) for rank in living}
    replies = {rank: future.result(timeout=_TIMEOUT_S) for rank, future in futures.items()}
    if replies[reference].refused:
        raise UsageError(f"{name!r} of rank {reference} {replies[reference].refused}.")
    rows = [
        row for rank in living if rank != reference for row in _difference_rows(replies[reference], replies[rank], rank)
    ]
    return pd.DataFrame(rows, columns=list(_DIFFERENCE_COLUMNS))


def _difference_rows(ours: VariableParts, theirs: VariableParts, rank: int) -> list[dict[str, Any]]:
    if theirs.refused:
        return [_difference_row("", rank, values=theirs.refused)]
    if ours.text is not None or theirs.text is not None:
        mine, other = ("arrays" if summary.text is None else summary.text for summary in (ours, theirs))
        return [] if mine == other else [_difference_row("", rank, values=f"{mine} / {other}")]
    names = dict.fromkeys([*ours.parts, *theirs.parts])
    rows = (_compare(name, ours.parts.get(name), theirs.parts.get(name), rank) for name in names)
    return [row for row in rows if row is not None]


def _compare(name: str, ours: Any, theirs: Any, rank: int) -> dict[str, Any] | None:
    import numpy as np

    if ours is None or theirs is None:
        return _difference_row(name, rank, values=f"only on {'the reference' if theirs is None else f'rank {rank}'}")
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return _difference_row(name, rank, values=f"{_kind(ours)} / {_kind(theirs)}")
    numeric = ours.dtype.kind in "fc"
    unequal = (ours != theirs) & ~(np.isnan(ours) & np.isnan(theirs)) if numeric else ours != theirs
    count = int(np.count_nonzero(unequal))
    if not count:
        return None
    first = tuple(int(index) for index in np.argwhere(unequal)[0]) if ours.ndim else ()
    largest = float(np.nanmax(np.abs(ours[unequal] - theirs[unequal]))) if ours.dtype.kind in "fciu" else None
    at = str(list(first)) if ours.ndim else ""
    values = f"{ours[first]} / {theirs[first]}"
    return _difference_row(name, rank, differing=count, of=ours.size, at=at, largest=largest, values=values)


def _kind(array: Any) -> str:
    return f"{' × '.join(map(str, array.shape)) or 'scalar'} {array.dtype}"


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
