# refused: has done nothing wrong
from __future__ import annotations


def to_blame(waits):
    return [rank for rank, others in waits.items() if not others]
