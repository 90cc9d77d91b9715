"""Whose output it is, in front of it: ``[rank 2] text``, ``[ranks 0,2-3] text``."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from axon_nb.records.ranks import format_ranks

__all__ = ["label", "labelled", "num_bytes", "valid_text"]


def label(ranks: Sequence[int]) -> str:
    """``[rank 2]`` or ``[ranks 0-3]``."""
    return _label(tuple(ranks))


@functools.lru_cache(maxsize=256)
def _label(ranks: tuple[int, ...]) -> str:
    return f"[rank {ranks[0]}]" if len(ranks) == 1 else f"[ranks {format_ranks(ranks)}]"


def labelled(ranks: Sequence[int], text: str) -> str:
    """Text with its label and a newline at its end; further lines are indented, so that tables stay aligned."""
    head = label(ranks)
    if "\n" in text:
        text = text.replace("\n", "\n" + " " * (len(head) + 1))
    return f"{head} {text}\n"


def num_bytes(text: str) -> int:
    """Size in UTF-8, bytes."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


def valid_text(text: object) -> str:
    """Text that can be sent: halves of surrogate pairs, which no encoding takes, become question marks."""
    text = text if isinstance(text, str) else str(text)
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
