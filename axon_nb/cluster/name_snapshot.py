"""The names of a rank as of the end of its last cell: completions while it does not answer."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["NameSnapshot"]

_ATTRIBUTE = re.compile(r"(?<![\w.\])])([A-Za-z_]\w*)\.(\w*)$")
_KEY = re.compile(r"(?<![\w.\])])([A-Za-z_]\w*)\[((['\"])?[^'\"\[\]]*)$")
_NAME = re.compile(r"(?<![\w.])([A-Za-z_]\w*)?$")
_WORDS = (*keyword.kwlist, *(name for name in dir(builtins) if not name.startswith("_")))


class NameSnapshot:
    """Names with their attributes and keys; see `axon_nb.engine.name_snapshot`."""

    def __init__(self) -> None:
        self._names: Mapping[str, Mapping[str, Any]] = {}
        self._types: dict[str, list[str]] = {}

    def __bool__(self) -> bool:
        return bool(self._names)

    def update(self, names: Mapping[str, Mapping[str, Any]], types: Mapping[str, list[str]]) -> None:
        """Take in what the rank has told; from any thread."""
        self._types = {**self._types, **types}
        self._names = names

    def names(self) -> list[str]:
        """The names."""
        return list(self._names)

    def types(self) -> list[str]:
        """Names of the types whose attributes are known."""
        return list(self._types)

    def complete(self, before: str) -> tuple[str, list[str]]:
        """What may stand at the end of the line `before`: the text there that is replaced, and by what."""
        if match := _KEY.search(before):
            name, fragment, quote = match.groups()
            return self._keys(name, fragment, quote)
        if match := _ATTRIBUTE.search(before):
            name, fragment = match.groups()
            entry = self._names.get(name, {})
            found = {*entry.get("own", ()), *self._types.get(entry.get("type", ""), ())}
            return fragment, _beginning(found, fragment)
        match = _NAME.search(before)
        fragment = (match.group(1) or "") if match else ""
        if match is None or _in_text(before):
            return "", []
        return fragment, _beginning({*self._names, *_WORDS}, fragment)

    def _keys(self, name: str, fragment: str, quote: str | None) -> tuple[str, list[str]]:
        keys = [str(key) for key in self._names.get(name, {}).get("keys", ())]
        if quote is None:
            return fragment, [key for key in keys if key.startswith(fragment)]
        inner = fragment[1:]
        return inner, [key[1:-1] for key in keys if key[0] in "'\"" and key[1:].startswith(inner)]


def _beginning(words: Iterable[str], fragment: str) -> list[str]:
    """Those that begin so; private ones only when asked for."""
    private = fragment.startswith("_")
    return sorted(word for word in words if word.startswith(fragment) and (private or not word.startswith("_")))


def _in_text(before: str) -> bool:
    return before.count('"') % 2 == 1 or before.count("'") % 2 == 1
