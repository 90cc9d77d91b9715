"""The variables of all ranks as one table, and whether ranks agree on them.

Where a variable differs between ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from axon_nb.cluster.rpc import requests
from axon_nb.errors import UsageError
from axon_nb.records.protocol.inspection import DescribeVariables, TakeVariableApart, VariableFacts, VariableParts
from axon_nb.records.ranks import format_ranks, name_ranks

if TYPE_CHECKING:
    import pandas as pd

    from axon_nb.cluster.state import ClusterState

__all__ = ["agreement", "difference_frame", "variables_frame"]

_FACTS_LIMIT_S = 60.0
_VARIABLE_COLUMNS = ("name", "type", "shape", "dtype", "device", "placements", "bytes", "ranks")


def variables_frame(state: ClusterState) -> pd.DataFrame:
    """One row a variable; `bytes` of all ranks together.

    Raises:
        UsageError: a rank runs a cell.
    """
    import pandas as pd

    if state.busy:
        raise UsageError(
            f"Rank {format_ranks(state.busy)} runs a cell: its variables are told when that is over; `%shards` asks "
            "while it runs."
        )
    living = state.living
    futures = {rank: requests.call(state.connection.client, rank, DescribeVariables()) for rank in living}
    by_name: dict[str, dict[int, VariableFacts]] = {}
    for rank, future in futures.items():
        for fact in future.result(timeout=_FACTS_LIMIT_S):
            by_name.setdefault(fact.name, {})[rank] = fact
    rows = [
        _variable_row(name, facts, living) for name, facts in sorted(by_name.items(), key=lambda item: item[0].lower())
    ]
    return pd.DataFrame(rows, columns=list(_VARIABLE_COLUMNS))


def _variable_row(name: str, facts: Mapping[int, VariableFacts], ranks: Sequence[int]) -> dict[str, Any]:
    shown = {column: _common([getattr(fact, key) for fact in facts.values()]) for column, key in _SHOWN.items()}
    total = sum(fact.bytes for fact in facts.values())
    return {"name": name, **shown, "bytes": total, "ranks": agreement(facts, ranks)}


_SHOWN = {"type": "type", "shape": "shape", "dtype": "dtype", "device": "device", "placements": "where"}


def _common(values: Sequence[str]) -> str:
    found = list(dict.fromkeys(values))
    return found[0] if len(found) == 1 else f"{found[0]}, …" if len(found) > 2 else " or ".join(found)


def agreement(facts: Mapping[int, VariableFacts], ranks: Sequence[int]) -> str:
    """Whether ranks have the same value, in words: ``same``, ``differs on rank 2``, ``only on ranks 0-1``.

    Args:
        facts: What each rank that has the variable tells of it.
        ranks: All ranks that were asked.
    """
    missing = [rank for rank in ranks if rank not in facts]
    only = f"only on {name_ranks(facts)}" if missing else ""
    if any("Shard" in fact.where or "Partial" in fact.where for fact in facts.values()):
        return ", ".join(filter(None, ["split", only]))
    kinds = {rank: (fact.type, fact.shape, fact.dtype, fact.digest) for rank, fact in facts.items()}
    groups = Counter(kinds.values()).most_common()
    if len(groups) == 1:
        known = bool(groups[0][0][3])
        return only or ("same" if known and len(facts) > 1 else "" if known else "not compared")
    if groups[0][1] == 1 or (len(groups) > 2 and groups[0][1] <= len(facts) // 2):
        return ", ".join(filter(None, ["differs", only]))
    # Of a tie the one that the lowest rank has is the reference.
    most = [kind for kind, count in groups if count == groups[0][1]]
    reference = next(kind for kind in kinds.values() if kind in most)
    others = [rank for rank, kind in kinds.items() if kind != reference]
    return ", ".join(filter(None, [f"differs on {name_ranks(others)}", only]))


_PARTS_LIMIT_S = 60.0
_DIFFERENCE_COLUMNS = ("part", "rank", "differing", "of", "first at", "largest difference", "values")


def difference_frame(state: ClusterState, name: str, reference: int = 0) -> pd.DataFrame:
    """Where a variable of other ranks differs from that of `reference`; empty when it does not.

    Args:
        state: The cluster.
        name: A tensor, a module, an array, a table, or anything else that has a text.
        reference: The rank with which the others are compared.

    Returns:
        One row for each part and rank that differ: how many elements of how many, the index of the first, the largest
        absolute difference, and the two values at the first (of the reference, of the rank).

    Raises:
        UsageError: a rank runs a cell, no rank has the variable, or it cannot be compared.
    """
    import pandas as pd

    if state.busy:
        raise UsageError(f"Rank {format_ranks(state.busy)} runs a cell: compare when that is over.")
    if reference not in state.ranks or reference in state.health.dead:
        raise UsageError(f"Rank {reference} cannot be compared with: it is dead, or no rank of 0 to {state.ranks[-1]}.")
    living = state.living
    futures = {rank: requests.call(state.connection.client, rank, TakeVariableApart(name)) for rank in living}
    found = {rank: future.result(timeout=_PARTS_LIMIT_S) for rank, future in futures.items()}
    if found[reference].refused:
        raise UsageError(f"{name!r} of rank {reference} {found[reference].refused}.")
    rows = [
        row for rank in living if rank != reference for row in _difference_rows(found[reference], found[rank], rank)
    ]
    return pd.DataFrame(rows, columns=list(_DIFFERENCE_COLUMNS))


def _difference_rows(ours: VariableParts, theirs: VariableParts, rank: int) -> list[dict[str, Any]]:
    if theirs.refused:
        return [_difference_row("", rank, values=theirs.refused)]
    if ours.text is not None or theirs.text is not None:
        mine, other = ("arrays" if own.text is None else own.text for own in (ours, theirs))
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
