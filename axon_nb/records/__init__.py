"""Plain data records that cross processes, and the span ring. Standard library only."""

from __future__ import annotations

from axon_nb.records.memory import MemoryUse
from axon_nb.records.spans import Span
from axon_nb.records.telemetry import Activity, RankState, Shard

__all__ = ["Activity", "MemoryUse", "RankState", "Shard", "Span"]
