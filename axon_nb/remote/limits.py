"""Cuts a reply to a number of characters and says so, so that it stays valid JSON with its most important parts."""

from __future__ import annotations

import json
from typing import Any

_STEPS = ((64, 4000), (32, 1500), (16, 600), (8, 240), (4, 100), (2, 40))
"""Entries of a list and characters of a text that are kept; the next step applies while the reply is too large."""


def within(reply: dict[str, Any], characters: int) -> dict[str, Any]:
    """Return the reply, or as much of it as `characters` of JSON hold, then with ``"cut": true``.

    Lists keep their first entries, texts their end, which says more than their start.
    """
    if len(json.dumps(reply)) <= characters:
        return reply
    for entries, length in _STEPS:
        cut = {**_cut(reply, entries, length), "cut": True}
        if len(json.dumps(cut)) <= characters:
            return cut
    return {"cut": True, "keys": sorted(reply)}


def _cut(value: Any, entries: int, length: int) -> Any:
    if isinstance(value, dict):
        return {key: _cut(each, entries, length) for key, each in list(value.items())[: 4 * entries]}
    if isinstance(value, list):
        return [_cut(each, entries, length) for each in value[:entries]]
    if isinstance(value, str) and len(value) > length:
        return f"…{value[-length:]}"
    return value
