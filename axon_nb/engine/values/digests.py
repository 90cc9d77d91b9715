"""Digests of a value and of all its parts, by which ranks compare values without sending them."""

from __future__ import annotations

import hashlib
import re
import time
from typing import Any

from axon_nb.engine.values.parts import SCALARS, CannotCompareError, Node, describe, digest_of
from axon_nb.records.protocol.inspection import VariablePart
from axon_nb.records.units import format_bytes

_MAX_SECONDS = 30.0
"""Time for one variable, or for a table of all."""
_MAX_NODES = 1_000_000
_MAX_DEPTH = 100
_MAX_BYTES = 1 << 28
"""Most bytes of leaves that are sent to be compared element by element."""
_MAX_TEXT = 400
_CHUNK = 1 << 26
_CANNOT_PICKLE = re.compile(r"cannot pickle '([^']+)'")
_NAMES = {
    "_thread.lock": "a lock",
    "_thread.RLock": "a lock",
    "generator": "a generator",
    "weakref": "a weak reference",
}


def _reason(value: Any, error: Exception) -> str:
    match = _CANNOT_PICKLE.search(str(error))
    if match:
        return _NAMES.get(match.group(1), f"a {match.group(1)}")
    return f"a {type(value).__name__}: {type(error).__name__}: {str(error).partition(chr(10))[0][:100]}".rstrip(": ")


class _TooMuchError(Exception):
    """The variable takes too long to compare; the message says what is exceeded."""


class Walk:
    """Takes a value apart, and keeps digests of its parts in the order in which they are met.

    Args:
        name: The variable's.
        began: When the time for it began, on the monotonic clock; None: now.
        max_bytes: Most bytes that are digested; None: no limit.
        wanted: The numbers of the parts to collect; then nothing is digested.
    """

    def __init__(
        self,
        name: str,
        *,
        began: float | None = None,
        max_bytes: int | None = None,
        wanted: frozenset[int] | None = None,
    ) -> None:
        self._end = (time.monotonic() if began is None else began) + _MAX_SECONDS
        self._max_bytes, self._wanted, self._bytes = max_bytes, wanted, 0
        self._path = [name]
        self._active: dict[int, int] = {}
        """Depths of the values that the current one is a part of, by id."""
        self._seen: dict[int, tuple[bytes, bytes, Any]] = {}
        """Head and digest by id, with the value, so that its id stays its own."""
        self._unrecorded = 0
        self.digests, self.heads, self.labels = bytearray(), bytearray(), bytearray()
        """16, 8 and 8 bytes for each part: of all it holds, of its kind alone, and of how it is reached."""
        self.ends: list[int] = []
        """For each part, the number of the one that follows its last child."""
        self.skipped: dict[int, tuple[str, str]] = {}
        """What is not compared, by number: its path and why."""
        self.found: dict[int, VariablePart] = {}

    def run(self, value: Any) -> None:
        """Walk over a variable; if that is too much, nothing of it is compared."""
        try:
            self._visit(value, "")
        except (_TooMuchError, RecursionError, MemoryError) as error:
            reason = str(error) if isinstance(error, _TooMuchError) else type(error).__name__
            self.digests, self.heads, self.labels = bytearray(16), bytearray(8), bytearray(8)
            self.ends, self.skipped = [1], {0: (self._path[0], reason)}

    def named_skips(self) -> list[tuple[str, str]]:
        """The first of what is not compared, and how many more there are."""
        first = list(self.skipped.values())[:3]
        rest = len(self.skipped) - len(first)
        return [*first, *([("…", f"{rest} more")] if rest else [])]

    def _visit(self, value: Any, label: str) -> bytes:
        index = len(self.ends)
        if not self._unrecorded:
            self.digests += bytes(16)
            self.heads += bytes(8)
            self.labels += digest_of([label.encode("utf-8", "surrogatepass")], 8)
            self.ends.append(0)
        if index > _MAX_NODES:
            raise _TooMuchError(f"more than {_MAX_NODES:,} values")
        if index % 1024 == 0 and time.monotonic() > self._end:
            raise _TooMuchError(f"more than {_MAX_SECONDS:.0f} s")
        head, digest = self._digests(value, index)
        if not self._unrecorded:
            self.digests[16 * index : 16 * index + 16], self.heads[8 * index : 8 * index + 8] = digest, head
            self.ends[index] = len(self.ends)
        return digest

    def _digests(self, value: Any, index: int) -> tuple[bytes, bytes]:
        if type(value) in SCALARS:
            return self._finish(describe(value), index)
        key = id(value)
        if key in self._active:
            node = Node(f"the value {len(self._path) - self._active[key]} levels up")
            return self._finish(node, index)
        if key in self._seen:  # what it holds has been numbered
            if self._wanted is not None and index in self._wanted:
                self._collect(describe(value), index)
            return self._seen[key][:2]
        self._active[key] = depth = len(self._path)
        try:
            if depth > _MAX_DEPTH:
                raise CannotCompareError(f"nested more than {_MAX_DEPTH} levels deep")
            result = self._finish(describe(value), index)
        except (_TooMuchError, RecursionError, MemoryError):
            raise
        except Exception as error:  # whatever an odd object raises
            reason = str(error) if isinstance(error, CannotCompareError) else _reason(value, error)
            del self._path[depth:]
            if self._unrecorded:
                raise CannotCompareError(reason) from None
            # Its children are forgotten: they were numbered for nothing.
            del self.digests[16 * index + 16 :], self.heads[8 * index + 8 :], self.labels[8 * index + 8 :]
            del self.ends[index + 1 :]
            self.skipped = {number: why for number, why in self.skipped.items() if number < index}
            self.skipped[index] = "".join(self._path), reason
            result = digest_of([b"skipped"], 8), digest_of([b"skipped"], 16)
        finally:
            del self._active[key]
        self._seen[key] = (*result, value)
        return result

    def _finish(self, node: Node, index: int) -> tuple[bytes, bytes]:
        if self._wanted is not None and index in self._wanted and not self._unrecorded:
            self._collect(node, index)
        head = digest_of([node.kind.encode("utf-8", "surrogatepass"), node.detail], 8)
        total = hashlib.blake2b(head, digest_size=16)
        if node.data is not None and self._wanted is None:
            self._bytes += node.size
            if self._max_bytes is not None and self._bytes > self._max_bytes:
                raise _TooMuchError(f"more than {format_bytes(self._max_bytes)}")
            for buffer in node.data():
                view = memoryview(buffer).cast("B") if not isinstance(buffer, bytes) else memoryview(buffer)
                for start in range(0, len(view), _CHUNK):
                    if start and time.monotonic() > self._end:
                        raise _TooMuchError(f"more than {_MAX_SECONDS:.0f} s")
                    total.update(view[start : start + _CHUNK])
        self._unrecorded += node.is_unordered
        parts = []
        try:
            for label, child in node.children:
                self._path.append(label)
                parts.append(digest_of([label.encode("utf-8", "surrogatepass")], 8) + self._visit(child, label))
                self._path.pop()
        finally:
            self._unrecorded -= node.is_unordered
        for part in sorted(parts) if node.is_unordered else parts:
            total.update(part)
        return head, total.digest()

    def _collect(self, node: Node, index: int) -> None:
        array = None
        if node.array is not None:
            self._bytes += node.size
            array = node.array() if self._bytes <= _MAX_BYTES else None
        text = node.kind if node.text is None else node.text()
        if len(text) > _MAX_TEXT:  # equal beginnings are not equal values
            digest = digest_of([text.encode("utf-8", "surrogatepass")], 8).hex()
            text = f"{text[:_MAX_TEXT]}… ({len(text):,} characters, digest {digest})"
        self.found[index] = VariablePart("".join(self._path), node.kind, text, array)
