"""Made-up memory use of ranks, as they would report it to `%memory`."""

from __future__ import annotations

from typing import Any

from axon_nb.cluster.inspection.memory import MemorySnapshot
from axon_nb.records.memory import MemoryUse

MIB = 2**20


GIB = 2**30


SIZES = {"parameters": 40 * MIB, "gradients": 40 * MIB, "optimizer": 80 * MIB}


def use(rank: int = 0, **more: Any) -> MemoryUse:
    """Measured on a CPU rank."""
    fields: dict[str, Any] = {
        "by_role": {**SIZES, "other": 10 * MIB},
        "resident": 500 * MIB,
        "resident_peak": 600 * MIB,
        "capacity": 60 * GIB,
        "occupied": 500 * MIB,
    }
    return MemoryUse(rank, 0, more.pop("source", "storages"), **{**fields, **more})


def answers(*uses: MemoryUse, estimated: dict[str, int] | None = None, notes: tuple[str, ...] = ()) -> MemorySnapshot:
    """Of these ranks, each with the same estimate."""
    estimates = {} if estimated is None else {own.rank: MemoryUse(own.rank, 0, "estimate", estimated) for own in uses}
    return MemorySnapshot({own.rank: own for own in uses}, estimates, notes)
