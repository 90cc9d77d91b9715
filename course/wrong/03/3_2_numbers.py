# refused: numbers, not bytes
from __future__ import annotations


def block_bytes(batch, context, hidden, heads):
    return 16 * batch * context * hidden + batch * heads * context**2
