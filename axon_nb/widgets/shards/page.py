"""Shards as a picture, a table and text, which need neither a kernel nor scripts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from axon_nb.records.ranks import name_ranks
from axon_nb.records.units import format_bytes
from axon_nb.widgets.html import cell_style, data_cells, figure, head_cells, note_lines, svg_uri, table_style
from axon_nb.widgets.shards.boxes import boxes_in_words, draw, drawing_svg
from axon_nb.widgets.shards.tensors import PlacedTensor, bytes_by_rank, in_words

__all__ = ["heading", "shards_bundle", "shown_shape"]

_CELL = cell_style(14, above=3, wraps=True)
_MAX_ROWS = 200


def shown_shape(tensor: PlacedTensor) -> str:
    """Such as ``64 × 32 float32``."""
    return f"{' × '.join(map(str, tensor.shape)) or 'scalar'} {tensor.dtype}"


def heading(title: str, tensors: Sequence[PlacedTensor]) -> str:
    """Such as ``model: 12 tensors on 4 ranks, 1.20 MiB in all, 307 KiB on each rank``."""
    held = bytes_by_rank(tensors)
    low, high = min(held.values(), default=0), max(held.values(), default=0)
    each = f"{format_bytes(low)} on each" if low == high else f"{format_bytes(low)} to {format_bytes(high)} on a rank"
    count = f"{len(tensors)} tensor{'' if len(tensors) == 1 else 's'}"
    on = f"{len(held)} rank{'' if len(held) == 1 else 's'}"
    return f"{title}: {count} on {on}, {format_bytes(sum(held.values()))} in all, {each}"


def shards_bundle(title: str, tensors: Sequence[PlacedTensor], notes: Sequence[str] = ()) -> dict[str, str]:
    """A MIME bundle.

    Args:
        title: What is shown, such as ``model``.
        tensors: In the order in which they are shown.
        notes: Sentences below.
    """
    shown = tensors[:_MAX_ROWS]
    more = [f"{len(tensors) - len(shown)} more tensors are left out here."] if len(tensors) > len(shown) else []
    return {"text/html": _html(title, tensors, [*notes, *more]), "text/plain": _text(title, tensors, notes)}


def _text(title: str, tensors: Sequence[PlacedTensor], notes: Sequence[str]) -> str:
    rows = [(tensor.name, tensor.role, shown_shape(tensor), in_words(tensor), _each(tensor)) for tensor in tensors]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)] if rows else []
    lines = (
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
    return "\n".join([heading(title, tensors), *lines, *notes])


def _each(tensor: PlacedTensor) -> str:
    sizes = {part.bytes for part in tensor.parts}
    low, high = min(sizes, default=0), max(sizes, default=0)
    return f"{format_bytes(low)} each" if low == high else f"{format_bytes(low)} to {format_bytes(high)}"


def _html(title: str, tensors: Sequence[PlacedTensor], notes: Sequence[str]) -> str:
    titles = ("tensor", "", "shape", "where", "on a rank", "parts by rank")
    rows = "".join(map(_row, tensors[:_MAX_ROWS]))
    ranks = bytes_by_rank(tensors)
    total = ", ".join(f"{name_ranks(same)}: {format_bytes(size)}" for size, same in _same(ranks))
    body = (
        f'<table style="{table_style()}"><thead><tr style="background:none">{head_cells(titles, _CELL)}</tr></thead>'
        f"<tbody>{rows}</tbody></table>{note_lines([total, *notes])}"
    )
    return figure(body, heading=heading(title, tensors))


def _same(held: dict[int, int]) -> list[tuple[int, list[int]]]:
    groups: dict[int, list[int]] = {}
    for rank, size in held.items():
        groups.setdefault(size, []).append(rank)
    return list(groups.items())


def _row(tensor: PlacedTensor) -> str:
    drawing = draw(tensor)
    said = escape("; ".join(boxes_in_words(drawing)))
    picture = (
        f'<img alt="{said}" title="{said}" src="{svg_uri(drawing_svg(drawing))}" width="{drawing.width + 2:g}" '
        f'height="{drawing.height + 2:g}" style="display:block;margin:0;max-width:none">'
    )
    cells = (tensor.role, shown_shape(tensor), in_words(tensor), _each(tensor))
    return (
        f'<tr style="background:none"><th scope="row" style="{_CELL};font-weight:normal;white-space:nowrap">'
        f'{escape(tensor.name)}</th>{data_cells(cells, _CELL)}<td style="{_CELL}">{picture}</td></tr>'
    )
