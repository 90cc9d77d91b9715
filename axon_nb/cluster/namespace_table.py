"""The variables of all ranks as one table, and whether ranks agree on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from axon_nb.cluster import remote
from axon_nb.errors import UsageError
from axon_nb.records.ranks import format_ranks, name_ranks

if TYPE_CHECKING:
    import pandas as pd

    from axon_nb.cluster.state import ClusterState

__all__ = ["agreement", "variables_frame"]

_FACTS = "axon_nb.engine.variable_facts:variable_facts"
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
    futures = {rank: remote.call(state.connection.client, rank, _FACTS) for rank in living}
    by_name: dict[str, dict[int, dict[str, Any]]] = {}
    for rank, future in futures.items():
        for fact in future.result(timeout=_FACTS_LIMIT_S):
            by_name.setdefault(fact["name"], {})[rank] = fact
    rows = [
        _variable_row(name, facts, living) for name, facts in sorted(by_name.items(), key=lambda item: item[0].lower())
    ]
    return pd.DataFrame(rows, columns=list(_VARIABLE_COLUMNS))


def _variable_row(name: str, facts: Mapping[int, dict[str, Any]], ranks: Sequence[int]) -> dict[str, Any]:
    shown = {column: _common([fact[key] for fact in facts.values()]) for column, key in _SHOWN.items()}
    total = sum(int(fact["bytes"]) for fact in facts.values())
    return {"name": name, **shown, "bytes": total, "ranks": agreement(facts, ranks)}


_SHOWN = {"type": "type", "shape": "shape", "dtype": "dtype", "device": "device", "placements": "where"}


def _common(values: Sequence[str]) -> str:
    found = list(dict.fromkeys(values))
    return found[0] if len(found) == 1 else f"{found[0]}, …" if len(found) > 2 else " or ".join(found)


def agreement(facts: Mapping[int, Mapping[str, Any]], ranks: Sequence[int]) -> str:
    """Whether ranks have the same value, in words: ``same``, ``differs on rank 2``, ``only on ranks 0-1``.

    Args:
        facts: What each rank that has the variable tells of it.
        ranks: All ranks that were asked.
    """
    missing = [rank for rank in ranks if rank not in facts]
    only = f"only on {name_ranks(facts)}" if missing else ""
    if any("Shard" in fact["where"] or "Partial" in fact["where"] for fact in facts.values()):
        return ", ".join(filter(None, ["split", only]))
    kinds = {rank: (fact["type"], fact["shape"], fact["dtype"], fact["digest"]) for rank, fact in facts.items()}
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
