# refused: The wide tensor is kept twice
from __future__ import annotations


def block_bytes(batch, context, hidden, heads):
    return 4 * (12 * batch * context * hidden + batch * heads * context**2)
