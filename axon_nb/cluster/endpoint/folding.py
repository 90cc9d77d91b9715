"""Values of ranks as plain JSON values: ranks with the same value share an entry, and large values are described."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from axon_nb.records.ranks import format_ranks

_MAX_ELEMENTS = 256
_MAX_TEXT = 4000


def folded(values: Mapping[int, Any], name: str) -> list[dict[str, Any]]:
    """Return an entry for each distinct value, with the ranks that have it.

    Args:
        values: Plain JSON values by rank.
        name: The value's key in an entry.
    """
    sharing: dict[str, list[int]] = {}
    for rank, value in sorted(values.items()):
        sharing.setdefault(json.dumps(value, sort_keys=True, default=str), []).append(rank)
    return [{"ranks": format_ranks(ranks), name: values[ranks[0]]} for ranks in sharing.values()]


def described(value: Any) -> Any:
    """Return a value as it is if it is a short plain JSON value; else what describes it."""
    shape = getattr(value, "shape", None)
    if shape is not None and hasattr(value, "dtype"):
        facts = {"shape": list(shape), "dtype": str(value.dtype)}
        return {**facts, "values": value.tolist()} if getattr(value, "size", 0) <= _MAX_ELEMENTS else facts
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = ""
    if text and len(text) <= _MAX_TEXT:
        return value
    shown = repr(value)
    return shown if len(shown) <= _MAX_TEXT else f"{shown[:_MAX_TEXT]}…"
