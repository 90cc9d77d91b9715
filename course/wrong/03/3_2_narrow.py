# refused: The wide part of the block
from __future__ import annotations


def block_bytes(batch, context, hidden, heads):
    return 4 * (10 * batch * context * hidden + batch * heads * context**2)
