# refused: Then blame the ring
from __future__ import annotations


def to_blame(waits):
    awaited = {other for others in waits.values() for other in others}
    return sorted(rank for rank in awaited if not waits[rank])
