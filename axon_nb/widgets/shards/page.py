"""Shards as text, and as a saved page of pictures and a table that needs neither a kernel nor scripts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from axon_nb.records.ranks import name_ranks
from axon_nb.records.units import format_bytes
from axon_nb.widgets.html import (
    CELL,
    WRAPPED_CELL,
    data_cells,
    figure,
    note_lines,
    row_title,
    svg_uri,
    table,
    table_row,
)
from axon_nb.widgets.shards.boxes import describe_boxes, draw, drawing_svg
from axon_nb.widgets.shards.folding import Alike, fold
from axon_nb.widgets.shards.tensors import PlacedTensor, bytes_by_rank, describe_placement, ranks_by_bytes

_TITLES = ("tensor", "", "shape", "where", "per rank", "parts by rank")
_MAX_ROWS = 60


def shown_shape(tensor: PlacedTensor) -> str:
    """Return text such as ``64 × 32 float32``."""
    return f"{' × '.join(map(str, tensor.shape)) or 'scalar'} {tensor.dtype}"


def local_sizes(tensor: PlacedTensor) -> str:
    """Return a tensor's bytes on each rank that has it, such as ``2.00 KiB`` or ``0 B to 80 B``."""
    sizes = {part.bytes for part in tensor.parts}
    low, high = format_bytes(min(sizes, default=0)), format_bytes(max(sizes, default=0))
    return low if low == high else f"{low} to {high}"


def heading(title: str, tensors: Sequence[PlacedTensor]) -> str:
    """Return text such as ``model: 12 tensors on 4 ranks, 1.20 MiB in all, 307 KiB on each rank``."""
    total_bytes = bytes_by_rank(tensors)
    low, high = min(total_bytes.values(), default=0), max(total_bytes.values(), default=0)
    each = f"{format_bytes(low)} on each" if low == high else f"{format_bytes(low)} to {format_bytes(high)} per rank"
    count = f"{len(tensors)} tensor{'' if len(tensors) == 1 else 's'}"
    ranks = f"{len(total_bytes)} rank{'' if len(total_bytes) == 1 else 's'}"
    return f"{title}: {count} on {ranks}, {format_bytes(sum(total_bytes.values()))} in all, {each}"


def shards_bundle(title: str, tensors: Sequence[PlacedTensor], notes: Sequence[str] = ()) -> dict[str, str]:
    """Return the tensors as `text/html` and `text/plain`.

    Args:
        title: What is shown, such as ``model``.
        tensors: The tensors in the order in which they are shown.
        notes: Sentences below.
    """
    rows = fold(tensors)
    num_omitted = sum(len(row.tensors) for row in rows[_MAX_ROWS:])
    omitted = [f"{num_omitted} more tensors are left out here."] if num_omitted else []
    return {
        "text/html": _html(title, tensors, rows, [*notes, *omitted]),
        "text/plain": _text(title, tensors, rows, notes),
    }


def _text(title: str, tensors: Sequence[PlacedTensor], folded: Sequence[Alike], notes: Sequence[str]) -> str:
    rows = [(_name(row), *_cells(row.first)) for row in folded]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)] if rows else []
    lines = (
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
    return "\n".join([heading(title, tensors), *lines, *notes])


def _name(row: Alike) -> str:
    return f"{row.name} ({len(row.tensors)} alike)" if len(row.tensors) > 1 else row.name


def _cells(tensor: PlacedTensor) -> tuple[str, str, str, str]:
    sizes = local_sizes(tensor)
    is_equal = len({part.bytes for part in tensor.parts}) <= 1
    return tensor.role, shown_shape(tensor), describe_placement(tensor), f"{sizes} each" if is_equal else sizes


def _html(title: str, tensors: Sequence[PlacedTensor], folded: Sequence[Alike], notes: Sequence[str]) -> str:
    totals = ranks_by_bytes(bytes_by_rank(tensors))
    total = ", ".join(f"{name_ranks(ranks)}: {format_bytes(size)}" for size, ranks in totals)
    rows = table(_TITLES, map(_row, folded[:_MAX_ROWS]))
    return figure(f"{rows}{note_lines([total, *notes])}", heading=heading(title, tensors))


def _row(row: Alike) -> str:
    tensor, drawing = row.first, draw(row.first)
    text = escape("; ".join(describe_boxes(drawing)))
    picture = (
        f'<img alt="{text}" title="{text}" src="{svg_uri(drawing_svg(drawing))}" width="{drawing.width + 2:g}" '
        f'height="{drawing.height + 2:g}" style="display:block;margin:0;max-width:none">'
    )
    return table_row(
        row_title(escape(_name(row))),
        data_cells(_cells(tensor), WRAPPED_CELL),
        f'<td style="{CELL}">{picture}</td>',
    )
