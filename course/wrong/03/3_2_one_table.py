# refused: one for all of them
from __future__ import annotations


def block_bytes(batch, context, hidden, heads):
    return 4 * (16 * batch * context * hidden + batch * context**2)
