# refused: got []; right is
from __future__ import annotations


def to_blame(waits):
    awaited = {other for others in waits.values() for other in others}
    return sorted(rank for rank in awaited if not waits[rank] or any(rank in waits[other] for other in waits[rank]))
