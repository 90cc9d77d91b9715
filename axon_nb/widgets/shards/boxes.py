"""Drawings of a tensor's parts: boxes in proportion to the tensor's shape, coloured by rank, with a text for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from axon_nb.records.colors import INK, KINDS, RANKS
from axon_nb.records.ranks import format_ranks, name_ranks
from axon_nb.records.units import format_bytes
from axon_nb.widgets.palette import rank_color, text_color
from axon_nb.widgets.shards.tensors import Part, PlacedTensor

_MAX_SIDE, _MIN_SIDE = 150.0, 18.0
_AREA = 3000.0
"""Approximate area of a drawing in square units; its sides stay between `_MIN_SIDE` and `_MAX_SIDE`."""
_CHAR_WIDTH = 6.2
_PALE = 0.55
"""Opacity of the colours in every second group of eight ranks."""


@dataclass(frozen=True, slots=True)
class Box:
    """One part as a rectangle, in units of the drawing."""

    x: float
    y: float
    width: float
    height: float
    rank: int
    """The first one that holds it; -1: all ranks hold a copy."""
    ranks: tuple[int, ...]
    """All that hold it."""
    label: str
    """Ranks, if there is room for them."""
    text: str
    """Description for a tooltip, a screen reader, or a table."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """A tensor as boxes."""

    width: float
    height: float
    boxes: tuple[Box, ...]
    empty: str
    """Which ranks hold no part of the tensor, such as ``rank 3: nothing``; empty: all have a part."""


def draw(tensor: PlacedTensor) -> Drawing:
    """Draw a tensor: dim 0 from top to bottom, another dim from left to right; a vector from left to right."""
    vertical, horizontal = _shown_dims(tensor)
    rows = tensor.shape[vertical] if vertical is not None else 1
    columns = tensor.shape[horizontal] if horizontal is not None else 1
    width, height = _size(rows, columns)
    parts = [part for part in tensor.parts if not part.is_empty]
    is_independent = tensor.kind == "own" and len(tensor.ranks) > 1
    boxes = []
    for number, part in enumerate(parts):
        y, box_height = _interval(part, vertical, rows, height)
        x, box_width = _interval(part, horizontal, columns, width)
        if is_independent:  # strips side by side
            x, box_width = width * number / len(parts), width / len(parts)
        boxes.append(_box(tensor, part, (x, y, box_width, box_height)))
    without = [rank for part in tensor.parts if part.is_empty for rank in part.ranks]
    empty = f"{name_ranks(without)}: nothing" if without else ""
    return Drawing(width, height, tuple(boxes), empty)


def _shown_dims(tensor: PlacedTensor) -> tuple[int | None, int | None]:
    count = len(tensor.shape)
    if count == 0:
        return None, None
    if count == 1:
        return None, 0
    sharded = [int(placement[6:-1]) for placement in tensor.placements if placement.startswith("Shard")]
    horizontal = next((dim for dim in sharded if dim > 0), 1 if count == 2 else count - 1)
    vertical = next((dim for dim in sharded if dim != horizontal), 0)
    return vertical, horizontal


def _size(rows: int, columns: int) -> tuple[float, float]:
    ratio = min(8.0, max(1 / 2, max(1, columns) / max(1, rows)))
    width = (_AREA * ratio) ** 0.5
    return _clamp_side(width), _clamp_side(_AREA / width)


def _clamp_side(length: float) -> float:
    return round(min(_MAX_SIDE, max(_MIN_SIDE, length)), 1)


def _interval(part: Part, dim: int | None, size: int, length: float) -> tuple[float, float]:
    """Return the start and length of a part along one side of the drawing."""
    if dim is None:
        return 0.0, length
    return length * part.offset[dim] / max(1, size), length * part.shape[dim] / max(1, size)


def _box(tensor: PlacedTensor, part: Part, area: tuple[float, float, float, float]) -> Box:
    x, y, width, height = (round(number, 2) for number in area)
    label = format_ranks(part.ranks)
    is_replica = len(part.ranks) > 1 and part.shape == tensor.shape
    fits = len(label) * _CHAR_WIDTH + 2 <= width and height >= 10
    rank = -1 if is_replica else part.ranks[0]
    return Box(x, y, width, height, rank, part.ranks, label if fits else "", _describe(tensor, part))


def _describe(tensor: PlacedTensor, part: Part) -> str:
    ranks = name_ranks(part.ranks)
    indices = ", ".join(
        f"{start}:{start + size}" if size != full_size else ":"
        for start, size, full_size in zip(part.offset, part.shape, tensor.shape, strict=True)
    )
    shape = " × ".join(map(str, part.shape)) or "a number"
    padded = f" ({format_bytes(part.padding)} of it padding)" if part.padding else ""
    each = " each" if len(part.ranks) > 1 else ""
    region = f"[{indices}], " if tensor.shape else ""
    return f"{ranks}: {region}{shape}, {format_bytes(part.bytes)}{each}{padded}, {part.device}"


def drawing_svg(drawing: Drawing) -> str:
    """Return the drawing as an SVG that looks right on light and dark pages."""
    size = f'width="{drawing.width + 2:g}" height="{drawing.height + 2:g}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="-1 -1 {drawing.width + 2:g} {drawing.height + 2:g}">'
        f"{''.join(map(_box_svg, drawing.boxes))}"
        f'<rect width="{drawing.width:g}" height="{drawing.height:g}" rx="2" fill="none" stroke="{INK}"/></svg>'
    )


def _box_svg(box: Box) -> str:
    gap = 1 if min(box.width, box.height) > 6 else 0
    color = KINDS["other"] if box.rank < 0 else rank_color(box.rank)
    opacity = f' fill-opacity="{_PALE}"' if box.rank >= 0 and box.rank // len(RANKS) % 2 else ""
    area = f'x="{box.x:g}" y="{box.y:g}" width="{box.width - gap:g}" height="{box.height - gap:g}"'
    shapes = f'<rect {area} fill="{color.both}"{opacity}/>'
    if not box.label:
        return shapes
    center = f'x="{box.x + box.width / 2:g}" y="{box.y + box.height / 2 + 3.5:g}"'
    return (
        f'{shapes}<text {center} text-anchor="middle" font-family="sans-serif" font-size="10" '
        f'fill="{text_color(color.both)}">{escape(box.label)}</text>'
    )


def describe_boxes(drawing: Drawing) -> Sequence[str]:
    """Return one line per part, and one for the ranks without a part."""
    return [*(box.text for box in drawing.boxes), *([drawing.empty] if drawing.empty else [])]
