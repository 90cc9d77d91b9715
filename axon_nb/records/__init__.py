"""Plain records that cross processes, and the span ring. Standard library only."""

from __future__ import annotations

from axon_nb.records.span import Span
from axon_nb.records.state import Activity, RankState

__all__ = ["Activity", "RankState", "Span"]
