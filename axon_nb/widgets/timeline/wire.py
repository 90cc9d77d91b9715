"""Spans as bytes, from the kernel to the browser: a JSON header and columns, read by `static/timeline/store.js`."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from axon_nb.cluster.inspection.span_table import SpanTable

BYTES_PER_SPAN = 36
BYTES_PER_PATCH = 10


def pack(
    table: SpanTable, header: Mapping[str, Any], *, origin_ns: int, patches: Sequence[Sequence[int]] = ()
) -> bytes:
    """Pack spans.

    Args:
        table: The spans; their numbers continue those that the browser has.
        header: Sent along; gets `first`, the number of the first span, `count`, and `patched`, the number of patches.
        origin_ns: The time that is 0 in the browser.
        patches: Facts learned since about spans that the browser has: number of the span, nanoseconds late, rank that
            was waited for.

    Returns:
        Header length (uint32) and 4 zero bytes; the header, padded to 8 bytes; then columns, little-endian: start
        (float64, seconds), length, bytes, late (float32; seconds, bytes, seconds), sequence (uint32, its low bits),
        number and late of the patches (uint32, float32), label, rank, line (uint16), stage, microbatch, by (int16),
        by of the patches (int16).
    """
    full_header = {**header, "first": table.first, "count": len(table), "patched": len(patches)}
    text = json.dumps(full_header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    columns = table.columns
    patched = np.array(patches, dtype=np.int64).reshape(-1, 3)
    parts = (
        _bytes((columns["start"] - origin_ns) / 1e9, "<f8"),
        _bytes((columns["end"] - columns["start"]) / 1e9, "<f4"),
        _bytes(columns["bytes"], "<f4"),
        _bytes(columns["late"] / 1e9, "<f4"),
        _bytes(columns["sequence"] & 0xFFFFFFFF, "<u4"),
        _bytes(patched[:, 0], "<u4"),
        _bytes(patched[:, 1] / 1e9, "<f4"),
        _bytes(columns["label"], "<u2"),
        _bytes(columns["rank"], "<u2"),
        _bytes(columns["line"].clip(0, 65535), "<u2"),
        *(_bytes(columns[name].clip(-1, 32767), "<i2") for name in ("stage", "microbatch", "by")),
        _bytes(patched[:, 2], "<i2"),
    )
    return struct.pack("<II", len(text), 0) + text + b"".join(parts)


def _bytes(column: npt.NDArray[Any], dtype: str) -> bytes:
    return column.astype(dtype).tobytes()
