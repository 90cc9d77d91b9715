# refused: for each pair of tokens
from __future__ import annotations


def block_bytes(batch, context, hidden, heads):
    return 4 * 16 * batch * context * hidden
