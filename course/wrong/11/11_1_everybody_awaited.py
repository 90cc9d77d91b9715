# refused: blames every rank that somebody waits for
from __future__ import annotations


def to_blame(waits):
    return sorted({other for others in waits.values() for other in others})
