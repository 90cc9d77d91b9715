# refused: does the way lead back to the rank itself
from __future__ import annotations


def to_blame(waits):
    awaited = {other for others in waits.values() for other in others}
    return sorted(rank for rank in awaited if not waits[rank]) or [rank for rank, others in waits.items() if others]
